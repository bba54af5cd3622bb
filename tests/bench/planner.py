"""Padding of whole layers where no granule may be cut, beside FSDP2's even Shard(0), the row-LCM rule and the bound.

And of whole models and of every recipe under the recipes' budget, where granules are a preference: padding, boundary,
and how long it takes to plan. Every row has the proven bound. Needs no machine but this one.

    python tests/bench/planner.py [--json FILE] [--instances N]

``--instances`` also compares as many random buffers with exhaustive search (20,000 take about a minute).
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from report import Row, arguments, publish
from rich.console import Console
from rich.table import Table

import recipes
from vescale.commit import preview
from vescale.fsdp import fully_shard
from vescale.partitions import lower_bound
from vescale.planner import COLLECTIVE, SegmentPlan, TensorSpec, even_padding, lcm_padding, plan_segment
from vescale.segments import plan_hard, plan_model
from vescale.train import compose, prepare

WIDTH = 170

Shapes = dict[str, tuple[int, ...]]

# Dimensions of the released config.json files, as transformers 5.24 and torchtitan state them: hidden size, heads,
# width of a head, feed-forward width, experts, vocabulary. Shapes are [out, in]; GPT-OSS stacks [experts, in, out].
# openai/gpt-oss-120b: hidden 2880, 64 heads and 8 for keys of 64, 128 experts of 2880, vocabulary 201088, 36 layers.
GPT_OSS: Shapes = {
    "input_layernorm": (2880,),
    "q_proj": (4096, 2880),
    "q_proj.bias": (4096,),
    "k_proj": (512, 2880),
    "k_proj.bias": (512,),
    "v_proj": (512, 2880),
    "v_proj.bias": (512,),
    "o_proj": (2880, 4096),
    "o_proj.bias": (2880,),
    "sinks": (64,),
    "post_attention_layernorm": (2880,),
    "router": (128, 2880),
    "router.bias": (128,),
    "experts.gate_up_proj": (128, 2880, 5760),
    "experts.gate_up_proj_bias": (128, 5760),
    "experts.down_proj": (128, 2880, 2880),
    "experts.down_proj_bias": (128, 2880),
}


def llama(hidden: int, kv: int, ffn: int) -> Shapes:
    """A decoder layer of meta-llama's Llama 3 models."""
    return {
        "input_layernorm": (hidden,),
        "q_proj": (hidden, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }


def experts(hidden: int, ffn: int, names: list[str]) -> Shapes:
    """Experts, each matrix a tensor of its own."""
    parts = (("gate_proj", (ffn, hidden)), ("up_proj", (ffn, hidden)), ("down_proj", (hidden, ffn)))
    return {f"{name}.{part}": shape for name in names for part, shape in parts}


# deepseek-ai/DeepSeek-V3: hidden 7168, 128 heads, ranks 1536 and 512 of the latent projections, 128 + 64 per head for
# queries and keys, 128 for values; feed-forward 18432 in the first 3 layers, then 256 experts of 2048 and a shared one.
DEEPSEEK_ATTENTION: Shapes = {
    "input_layernorm": (7168,),
    "q_a_proj": (1536, 7168),
    "q_a_layernorm": (1536,),
    "q_b_proj": (24576, 1536),
    "kv_a_proj_with_mqa": (576, 7168),
    "kv_a_layernorm": (512,),
    "kv_b_proj": (32768, 512),
    "o_proj": (7168, 16384),
    "post_attention_layernorm": (7168,),
}
DEEPSEEK_DENSE = DEEPSEEK_ATTENTION | experts(7168, 18432, ["mlp"])
DEEPSEEK_MOE = (
    DEEPSEEK_ATTENTION
    | {"gate": (256, 7168), "gate.e_score_correction_bias": (256,)}
    | experts(7168, 2048, ["shared_experts", *(f"experts.{i}" for i in range(256))])
)
# Qwen/Qwen3-30B-A3B: hidden 2048, 32 heads and 4 for keys of 128, 128 experts of 768, vocabulary 151936, 48 layers.
QWEN3_30B = {
    "input_layernorm": (2048,),
    "q_proj": (4096, 2048),
    "k_proj": (512, 2048),
    "v_proj": (512, 2048),
    "o_proj": (2048, 4096),
    "q_norm": (128,),
    "k_norm": (128,),
    "post_attention_layernorm": (2048,),
    "gate": (128, 2048),
} | experts(2048, 768, [f"experts.{i}" for i in range(128)])
LLAMA_8B, LLAMA_70B, LLAMA_405B = llama(4096, 1024, 14336), llama(8192, 1024, 28672), llama(16384, 1024, 53248)


def root(hidden: int, vocabulary: int) -> Shapes:
    """What no layer holds."""
    return {"embed_tokens": (vocabulary, hidden), "norm": (hidden,), "lm_head": (vocabulary, hidden)}


MODELS: dict[str, list[tuple[int, Shapes]]] = {
    "Llama-3.1-8B": [(32, LLAMA_8B), (1, root(4096, 128256))],
    "Llama-3-70B": [(80, LLAMA_70B), (1, root(8192, 128256))],
    "Llama-3.1-405B": [(126, LLAMA_405B), (1, root(16384, 128256))],
    "GPT-OSS-120B": [(36, GPT_OSS), (1, root(2880, 201088))],
    "Qwen3-30B-A3B": [(48, QWEN3_30B), (1, root(2048, 151936))],
    "DeepSeek-V3": [(3, DEEPSEEK_DENSE), (58, DEEPSEEK_MOE), (1, root(7168, 129280))],
}


def rows_of(shapes: Shapes, rows: int) -> list[TensorSpec]:
    """Granules of rows of the last dim, counted through leading dims; one dim and biases of experts: elements."""
    specs = []
    for name, shape in shapes.items():
        plain = len(shape) == 1 or "bias" in name
        specs.append(TensorSpec(name, math.prod(shape), 1 if plain else rows * shape[-1]))
    return specs


def whole(shapes: Shapes, prefix: str = "") -> list[TensorSpec]:
    """Granules of whole matrices where the name begins so, else of single rows."""
    return [
        t._replace(granularity=math.prod(shapes[t.name][-2:])) if t.granularity > 1 and t.name.startswith(prefix) else t
        for t in rows_of(shapes, 1)
    ]


class Case(NamedTuple):
    """A line of the table: what is planned, and the padding to reach; None where the bound is the goal."""

    name: str
    shapes: Shapes
    tensors: list[TensorSpec]
    num_ranks: int
    goal: float | None


CASES = [
    Case("GPT-OSS-120B, 1 row", GPT_OSS, rows_of(GPT_OSS, 1), 256, 0.001),
    Case("GPT-OSS-120B, 1 row", GPT_OSS, rows_of(GPT_OSS, 1), 1024, 0.001),
    Case("GPT-OSS-120B, 16 rows", GPT_OSS, rows_of(GPT_OSS, 16), 256, 0.003),
    Case("GPT-OSS-120B, 16 rows", GPT_OSS, rows_of(GPT_OSS, 16), 1024, 0.02),
    Case("GPT-OSS-120B, 128 flat rows", GPT_OSS, rows_of(GPT_OSS, 128), 256, 0.03),
    Case("GPT-OSS-120B, 128 flat rows", GPT_OSS, rows_of(GPT_OSS, 128), 1024, None),
    Case("DeepSeek-V3 dense layer, 1 row", DEEPSEEK_DENSE, rows_of(DEEPSEEK_DENSE, 1), 512, 0.0005),
    Case("DeepSeek-V3 MoE layer, 1 row", DEEPSEEK_MOE, rows_of(DEEPSEEK_MOE, 1), 512, 0.001),
    Case("DeepSeek-V3 MoE layer, whole experts", DEEPSEEK_MOE, whole(DEEPSEEK_MOE, "experts."), 256, 0.001),
    Case("Llama-3-70B, 32 rows", LLAMA_70B, rows_of(LLAMA_70B, 32), 16, 0.001),
    Case("Llama-3-70B, 32 rows", LLAMA_70B, rows_of(LLAMA_70B, 32), 64, 0.001),
    Case("Llama-3-70B, 32 rows", LLAMA_70B, rows_of(LLAMA_70B, 32), 256, 0.02),
    Case("Llama-3-70B, 32 rows", LLAMA_70B, rows_of(LLAMA_70B, 32), 512, None),
    Case("Qwen3-30B-A3B, whole experts", QWEN3_30B, whole(QWEN3_30B, "experts."), 64, 0.001),
    Case("Qwen3-30B-A3B, every matrix whole", QWEN3_30B, whole(QWEN3_30B), 64, None),
]


def hard() -> list[Row]:
    """Prints layers of which no granule is cut; padding is total / useful - 1."""
    table = Table(title="No granule cut: padding of one layer")
    for column in ("layer", "ranks", "FSDP2", "row-LCM", "one segment", "reached", "bound", "goal", "", "segments"):
        table.add_column(column, justify="left" if column in ("layer", "") else "right", no_wrap=column != "layer")
    rows = []
    for case in CASES:
        useful = sum(tensor.numel for tensor in case.tensors)
        shapes = list(case.shapes.values())
        even = even_padding(shapes, num_ranks=case.num_ranks) / useful
        lcm = lcm_padding(shapes, num_ranks=case.num_ranks) / useful
        one = plan_segment(case.tensors, num_ranks=case.num_ranks).padding
        plans = plan_hard(case.tensors, num_ranks=case.num_ranks)
        reached = sum(plan.numel for plan in plans) / useful - 1
        bound = lower_bound(case.tensors, num_ranks=case.num_ranks) / useful
        goal = bound if case.goal is None else case.goal
        verdict = "met" if reached <= goal else "the bound" if reached <= bound * 1.0001 else "not met"
        table.add_row(
            case.name,
            str(case.num_ranks),
            *(f"{share:.4%}" if share < 0.1 else f"{share:.1%}" for share in (even, lcm, one)),
            f"{reached:.4%}",
            f"{bound:.4%}",
            "bound" if case.goal is None else f"{case.goal:.2%}",
            verdict,
            "+".join(str(len(plan.tensors)) for plan in plans),
        )
        samples = {"ours": [reached], "FSDP2": [even], "row-LCM": [lcm], "one segment": [one], "bound": [bound]}
        name = f"padding, {case.name}, {case.num_ranks} ranks"
        rows.append(Row(name, reached, even, "fraction of useful elements", samples))
    Console(width=150).print(table)
    return rows


def preferred(max_padding: float = 0.01) -> list[Row]:
    """Prints models with granules as preferences under the budget of the recipes."""
    table, rows = _table(f"Granules as preferences: whole models, max_padding {max_padding:.0%} of the total"), []
    for name, parts in MODELS.items():
        for granule in ("1 row", "128 rows", "whole"):
            for num_ranks in (8, 64, 512, 1024, 10_240):
                units = []
                for count, shapes in parts:
                    tensors = whole(shapes) if granule == "whole" else rows_of(shapes, int(granule.split()[0]))
                    if "lm_head" in shapes and granule != "1 row":
                        tensors = rows_of(shapes, 1)  # recipes give AdamW what looks up or predicts tokens
                    tensors = [t._replace(shape=shapes[t.name]) for t in tensors]
                    units += [[t._replace(name=f"{len(units)}.{i}.{t.name}") for t in tensors] for i in range(count)]
                begin = time.process_time()
                plans = plan_model(units, num_ranks=num_ranks, max_padding=max_padding)
                seconds = time.process_time() - begin
                named = [(f"unit {i}", segments) for i, segments in enumerate(plans)]
                rows.append(_model_row(table, f"{name}, {granule}", num_ranks, named, seconds, max_padding))
    Console(width=WIDTH).print(table)
    return rows


def of_recipes(max_padding: float = 0.01) -> list[Row]:
    """Prints every shipped recipe of 1 B parameters or more with the granules of its own optimizer."""
    table, rows = _table(f"Recipes with their own granules, max_padding {max_padding:.0%} of the total"), []
    for path in sorted((Path(recipes.__file__).parent / "recipe").glob("*.yaml")):
        trainer = prepare(compose([f"recipe={path.stem}"]))
        if sum(param.numel() for param in trainer.model.parameters()) < 1e9:
            continue
        for module in (*trainer.model.units(), trainer.model):
            fully_shard(module, block_of=trainer.rules.block_of, max_padding=max_padding)
        for num_ranks in (8, 64, 512, 1024, 4096, 10_240):
            begin = time.process_time()
            plans = preview(trainer.model, num_ranks)
            seconds = time.process_time() - begin
            rows.append(_model_row(table, path.stem, num_ranks, plans, seconds, max_padding))
    Console(width=WIDTH).print(table)
    return rows


def _table(title: str) -> Table:
    table = Table(title=title)
    columns = ("", "ranks", "FSDP2", "row-LCM", "padding", "bound", "cut GB", "segments", "seconds", "goal", "exempt")
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "goal", "exempt") else "right", no_wrap=column != "")
    return table


def _model_row(
    table: Table,
    name: str,
    num_ranks: int,
    plans: Sequence[tuple[str, tuple[SegmentPlan, ...]]],
    seconds: float,
    max_padding: float,
) -> Row:
    """The bound is that of plans that cut anything: whole shards of COLLECTIVE elements, and the finest granules."""
    segments = [plan for _, unit in plans for plan in unit]
    useful, boundary = sum(plan.useful for plan in segments), sum(plan.cut_bytes for plan in segments)
    exempt, even, lcm, bound, counted = Counter[str](), 0, 0, 0, 0
    for unit_name, unit in plans:
        kinds = {plan.kind: [p for p in unit if p.kind == plan.kind] for plan in unit}
        for alike in kinds.values():
            tensors = [tensor for plan in alike for tensor in plan.tensors]
            shapes = [tensor.shape or () for tensor in tensors]
            even, lcm = even + even_padding(shapes, num_ranks=num_ranks), lcm + lcm_padding(shapes, num_ranks=num_ranks)
            bound += _finest_bound(tuple((t.numel, t.finest) for t in tensors), num_ranks)
            numel = sum(tensor.numel for tensor in tensors)
            if max_padding * numel < COLLECTIVE * num_ranks:
                exempt[f"{unit_name.split('.')[0] or 'root'} of {numel:,}"] += 1
            else:
                counted += sum(plan.numel - plan.useful for plan in alike)
    padding, goal = sum(plan.numel for plan in segments) / useful - 1, 0.01 if not boundary else 0.001
    met = "met" if padding <= goal else "the bound" if padding <= bound / useful else f"not met: {goal:.1%}"
    table.add_row(
        name,
        f"{num_ranks:,}",
        *(f"{share / useful:.2%}" for share in (even, lcm)),
        *(f"{share:.4%}" for share in (padding, bound / useful)),
        f"{boundary / 1e9:.3f}",
        f"{len(segments)} in {len(plans)}",
        f"{seconds:.3f}",
        "met but for the exempt" if met.startswith("not") and counted <= goal * useful else met,
        ", ".join(f"{count} x {what}" for what, count in exempt.items()),
    )
    samples = {"ours": [padding], "FSDP2": [even / useful], "row-LCM": [lcm / useful], "bound": [bound / useful]}
    samples |= {"boundary bytes": [float(boundary)], "seconds": [seconds]}
    return Row(f"padding, {name}, {num_ranks} ranks", padding, even / useful, "fraction of useful elements", samples)


@cache
def _finest_bound(tensors: tuple[tuple[int, int], ...], num_ranks: int) -> int:
    """Elements that one segment or more of these lengths and finest granularities pad at least."""
    specs = [TensorSpec(str(i), numel, finest) for i, (numel, finest) in enumerate(tensors)]
    return lower_bound(specs, num_ranks=num_ranks)


def random_instances(count: int) -> list[Row]:
    """Compares random buffers with exhaustive search: the generator and the search are the suite's."""
    file = Path(__file__).parents[1] / "vescale" / "test_planner.py"
    spec = importlib.util.spec_from_file_location("test_planner", file)
    assert spec is not None and spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    random, ratios = Random(0), []
    for i in range(count):
        tensors, num_ranks = suite.instance(random, large=i % 3 == 0)
        ratios.append(suite.planned_size(tensors, num_ranks) / suite.optimum(tensors, num_ranks))
    optimal = sum(ratio == 1 for ratio in ratios) / count
    return [
        Row(f"optimal of {count} random buffers", optimal, None, "fraction", {"ours": [optimal]}),
        Row(f"worst of {count} random buffers", max(ratios), None, "times the optimum", {"ours": [max(ratios)]}),
    ]


def main() -> None:
    parser = arguments("padding of plans")
    parser.add_argument("--instances", type=int, default=0, help="random buffers to compare with exhaustive search")
    options = parser.parse_args()
    rows = hard() + of_recipes() + preferred()
    rows += random_instances(options.instances) if options.instances else []
    publish("planner", rows, options.json)


if __name__ == "__main__":
    main()
