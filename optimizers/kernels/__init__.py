"""Kernels: the parts of a step that torch cannot do in one pass over memory, each in a file beside its torch twin.

A file has three functions of one signature::

    momentum_          the door: checks its arguments, then the kernel where there is a GPU, the twin elsewhere
    momentum_torch     the twin: torch operators, what the kernel is compared with
    momentum_triton    the kernel, launched

Every offset is 64 bits wide, every result is a function of the arguments alone (no atomics, no autotuning), and none
depends on where a flat run is cut or on how many matrices share a launch.
"""
