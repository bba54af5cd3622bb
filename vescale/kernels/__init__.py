"""Kernels over flat buffers: what torch cannot do in one launch, each in a file beside its torch twin.

A file's public function checks its arguments and runs the kernel where there is a GPU, the twin (``..._torch``)
elsewhere. Offsets are 64 bits wide, results a function of the arguments alone: no atomics, no autotuning.
"""
