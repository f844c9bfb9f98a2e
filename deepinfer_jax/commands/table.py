"""A description of a model as aligned text, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepinfer_jax.commands.description import Document

# Names shown of a list that may hold thousands.
_SHOWN_NAMES = 10
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(document: Document, name: str) -> str:
    """The description of :mod:`deepinfer_jax.commands.description` as text; ``name`` is the heading."""
    parts = [
        [name],
        _summary(document["config"]),
        ["Layers", *_schedule(document["schedule"])],
        ["Segments (layers that compile as one body)", *_segments(document["segments"])],
        ["Parameters", *_parameters(document)],
        ["State of a running request", *_state(document["state"])],
    ]
    if document["coverage"] is not None:
        parts += [
            ["Stored tensors", *_dtypes(document["dtypes"])],
            ["Coverage of config.json by the checkpoint", *_coverage(document["coverage"])],
            ["Weights id", *_weights_id(document["weights_id"])],
        ]
    return "\n\n".join("\n".join(part) for part in parts)


def aligned(rows: Iterable[Sequence[object]], right: frozenset[int] = frozenset()) -> str:
    """Rows of cells, the first of them headings, as lines of aligned columns; ``right``: those aligned to the right."""
    return "".join(f"{line}\n" for line in _columns(rows, right))


def _columns(rows: Iterable[Sequence[object]], right: frozenset[int] = frozenset()) -> list[str]:
    """Indented lines with aligned columns; the columns numbered in ``right`` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def padded(cell: str, column: int) -> str:
        return cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])

    return ["  ".join(["", *(padded(cell, column) for column, cell in enumerate(row))]).rstrip() for row in cells]


def _summary(config: Document) -> list[str]:
    engram, draft, vision = config["engram"], config["draft"], config["vision"]
    candidates = config["candidates"]
    selected = f"{config['index_topk']} entries a query"
    if candidates:
        selected += f", in {candidates['topk_blocks']} candidate blocks of {candidates['block_size']}"
    features = {
        "Engram": engram and f"before layers {_listed(engram['layer_ids'])}, n-grams to {engram['max_ngram_size']}",
        "draft head": draft and f"{draft['stages']} stages, {draft['block_size']} tokens a block",
        "vision": vision and f"{vision['num_hidden_layers']} layers, at most {vision['max_image_tokens']} image tokens",
    }
    return _columns(
        [
            ("vocabulary", f"{config['vocab_size']} tokens"),
            ("positions", f"at most {config['max_position_embeddings']}, window {config['sliding_window']}"),
            ("hidden", f"{config['hidden_size']}, in {config['hc_mult']} residual streams"),
            ("attention", f"{config['num_attention_heads']} heads of {config['head_dim']}"),
            ("selection", selected),
            ("experts", f"{config['n_routed_experts']}, {config['num_experts_per_tok']} a token, and a shared one"),
            *((feature, text or "none") for feature, text in features.items()),
        ]
    )


def _schedule(schedule: Sequence[Document]) -> list[str]:
    heading = ("layer", "side", "ratio", "mode", "KV", "selection", "")
    rows = [
        (
            layer["layer"],
            layer["side"],
            layer["ratio"],
            layer["mode"],
            _or_dash(layer["kv_source"]),
            _or_dash(layer["index_source"]),
            ", ".join(_extras(layer)),
        )
        for layer in schedule
    ]
    return _columns([heading, *rows], frozenset({0, 2, 4, 5}))


def _extras(layer: Document) -> Iterable[str]:
    if layer["engram"] is not None:
        yield "Engram before it"
    if layer["publishes_candidates"]:
        yield "publishes candidate blocks"
    if layer["inside_candidates"]:
        yield "selects inside candidate blocks"
    if layer["draft_tap"] is not None:
        yield "read by the draft head"


def _segments(segments: Sequence[Document]) -> list[str]:
    rows = []
    for segment in segments:
        first, last = segment["first_layer"], segment["last_layer"]
        runs = " + ".join(
            run["mode"] if run["layers"] == 1 else f"{run['layers']} {run['mode']}" for run in segment["runs"]
        )
        body = runs if segment["repeats"] == 1 else f"{segment['repeats']} x [{runs}]"
        engram = "" if segment["engram"] is None else "Engram, then "
        rows.append((f"{first}" if first == last else f"{first}-{last}", engram + body))
    return _columns(rows, frozenset({0}))


def _parameters(document: Document) -> list[str]:
    counts: dict[str, int] = document["parameters"]
    names = {"engram": "Engram tables", "draft": "draft head"}
    rows = [(names.get(part, part), f"{number:,}") for part, number in counts.items()]
    return _columns([*rows, ("in tensors", f"{document['tensors']:,}")], frozenset({1}))


def _state(state: Document) -> list[str]:
    heading = ("numerics", "per token", "per request")
    rows = [
        (numerics, f"{sizes['bytes_per_token']:,.0f} B", _bytes(sizes["bytes_per_slot"]))
        for numerics, sizes in state.items()
    ]
    return _columns([heading, *rows], frozenset({1, 2}))


def _dtypes(dtypes: Document) -> list[str]:
    rows = [(dtype, f"{total['tensors']:,}", _bytes(total["bytes"])) for dtype, total in dtypes.items()]
    return _columns([("dtype", "tensors", "size"), *rows], frozenset({1, 2}))


def _coverage(coverage: Document) -> list[str]:
    rows: list[tuple[str, str]] = [(name, f"{coverage[name]:,}") for name in ("described", "present")]
    for name in ("missing", "extra", "tied"):
        names = coverage[name]
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        listed = f"  {_listed(names[:_SHOWN_NAMES])}{more}" if names else ""
        rows.append((name, f"{len(names):,}{listed}"))
    return _columns([*rows, ("complete", "yes" if coverage["complete"] else "no")])


def _weights_id(identity: Document) -> list[str]:
    source = "of the content" if identity["verified"] else "unverified: of names, dtypes, shapes and places alone"
    return [f"  {identity['value']}", f"  {source}"]


def _bytes(number: int) -> str:
    if number < 1024:
        return f"{number} B"
    power = min((number.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{number / 1024**power:.2f} {_UNITS[power]}"


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def _or_dash(number: int | None) -> object:
    return "-" if number is None else number
