"""One client's visit: it receives, predicts, adapts and describes, slot by slot of its stream."""

from typing import Any

import torch
from flwr.app import ConfigRecord
from torch import Tensor

from fedtta_flwr.adaptation import collapse
from fedtta_flwr.data.build import own_batch
from fedtta_flwr.data.contracts import TakesPredictions
from fedtta_flwr.errors import DataError
from fedtta_flwr.memory import NO_SLOT, Cursor, Memory, Remembered
from fedtta_flwr.records import from_arrays, to_arrays
from fedtta_flwr.visited import Visited
from fedtta_flwr.workbench import Workbench


def visit_stream(
    bench: Workbench,
    client: str,
    request: ConfigRecord,
    personal: dict[str, Tensor] | None,
    memory: Memory,
) -> Visited:
    """One client's visit: score the mixture that came, then go through the next slots in order."""
    stream, adapter, result = bench.stream(client), bench.adapter, Visited()
    classes, finetune = bench.classes, bool(request["finetune"])
    wanted = str(request["descriptor"])
    about = {"client": client, "round": request["round"], **_with_prefix(request, "descriptor.")}
    lagged = bool(about.get("lagged"))
    bench.pursue(_with_prefix(request, "objective."))
    resumed = client in request["resuming"]  # type: ignore[operator]
    known = memory.recall(client, int(request["resume"]) if resumed else None)  # type: ignore[arg-type]
    cursor, sums = _recall(bench, client, known or Remembered(Cursor(0, NO_SLOT, 0)))
    slot, late_slot, result.late_round, seen = cursor
    if known is None and int(request["round"]) > 1:  # type: ignore[arg-type]
        # It joined late or has lost its memory: it goes on where the others are, with what the server knows of it.
        result.forgot, slot = True, min(int(request["begin"]), len(stream))  # type: ignore[arg-type]
    seen = slot - 1 if seen == NO_SLOT else seen
    adapter.load_adapted_state(bench.initial if personal is None else personal)
    parts = known.parts if known is not None else {}
    if own := parts.get("finetuned"):
        adapter.load_adapted_state(from_arrays(own))
    if late_slot != NO_SLOT and (finetune or "post" in bench.scores):
        kept = parts.get("late")
        x, y = (from_arrays(kept)["x"].to(bench.device), None) if kept else _batch(bench, client, late_slot)
        result.late_domain = stream.domains[late_slot]
        if finetune:
            adapter.adapt(x)
        if y is not None and "post" in bench.scores:
            result.count("late-seen", torch.bincount(y, minlength=classes))
            result.score("late", adapter.predict(x), y)
    end = min(slot + int(request["slots"]), len(stream))  # type: ignore[arg-type]
    late, late_batch = NO_SLOT, dict[str, Tensor]()
    last: tuple[int, Tensor, Tensor | None] | None = None
    for current in range(slot, end):
        x, y = _batch(bench, client, current)
        if not len(x):
            continue  # nothing has arrived at a live stream
        if last is not None and last[2] is not None and "post" in bench.scores:
            # No aggregation has followed: its own state is what it goes on with.
            result.count("post-seen", torch.bincount(last[2], minlength=classes))
            result.score("post", adapter.predict(last[1]), last[2])
        shifted = seen != NO_SLOT and stream.domains[current] != stream.domains[seen]
        _reset_where_due(bench, shifted, sums)
        if lagged and last is None:
            result.descriptor = bench.describe(wanted, about, x)
        result.domains.append(stream.domains[current])
        result.samples += len(x)
        outputs = _outputs(bench, x, scored=() if y is None else bench.scores)
        result.enter_confidence(outputs["tta"])
        sums = {key: collapse.predicted(of_one, outputs[key]) for key, of_one in sums.items()}
        if (share := collapse.largest_share(sums["tta"])) is not None:
            result.largest_share = max(result.largest_share, share)
        if y is not None and bench.scores:
            result.count("seen", torch.bincount(y, minlength=classes))
            for score in outputs.keys() & set(bench.scores):
                result.score(score, outputs[score], y)
        elif y is None and isinstance(stream, TakesPredictions):  # at once: the next batch may be a long time coming
            stream.predicted(current, outputs["tta"].softmax(dim=1).cpu(), int(request["round"]))  # type: ignore[arg-type]
        last, seen = (current, x, y), current
    if last is not None:
        current, x, y = last
        if not lagged:
            result.descriptor = bench.describe(wanted, about, x)
        late = current if finetune or y is not None else NO_SLOT
        late_batch = {"x": x} if finetune and y is None else {}
    if result.samples:
        # Where it is going, anyway: a graphics card needs no room for the states of all clients.
        result.state = {name: t.to("cpu", copy=True) for name, t in adapter.adapted_state().items()}
    result.memory = _memory(bench, Cursor(max(slot, end), late, int(request["round"]), seen))  # type: ignore[arg-type]
    result.memory.parts["predicted"] = to_arrays(sums)
    if finetune:  # a stream without labels may come by only once
        result.memory.parts["late"] = to_arrays(late_batch)
        # The server, which was sent nothing, still has the mixture that was finetuned, and will send it again.
        lost = (own or late_slot != NO_SLOT) and not result.samples
        result.memory.parts["finetuned"] = to_arrays(adapter.adapted_state() if lost else {})
    return result


def _reset_where_due(bench: Workbench, shifted: bool, sums: dict[str, Tensor]) -> None:
    """Take adapters back to the source model where the run config says so."""
    reset = bench.config.reset
    for key, adapter in (("tta", bench.adapter), ("lone", bench.lone)):
        if adapter is None:
            continue
        if shifted and reset == "each-shift":
            adapter.reset(bench.initial)
        elif reset == "collapse" and collapse.has_collapsed(sums[key]):
            adapter.reset(bench.initial)
            sums[key] = collapse.no_predictions(bench.classes, bench.device)


def _outputs(bench: Workbench, x: Tensor, *, scored: tuple[str, ...]) -> dict[str, Tensor]:
    """Adapt to one batch; return the logits [B, K] behind every score that can be had now, and of each adaptation."""
    outputs: dict[str, Tensor] = {}
    if "source" in scored:
        with torch.no_grad():
            outputs["source"] = bench.source(x)
    if bench.lone is not None:
        outputs["lone"] = bench.lone.adapt(x)  # labels or not: it goes through the whole stream
        if "local" in scored:
            outputs["local"] = bench.lone.predict(x)
    if "pre" in scored:
        outputs["pre"] = bench.adapter.predict(x)
    outputs["tta"] = bench.adapter.adapt(x)
    return outputs


def _batch(bench: Workbench, client: str, slot: int) -> tuple[Tensor, Tensor | None]:
    if bench.config.stream:
        x, y = own_batch(bench.config.stream, bench.stream(client), slot, bench.classes)
    else:
        x, y = bench.stream(client).batch(slot)
    if len(x) > bench.config.batch_size and "stream" in bench.node_config:  # of which the server knows nothing
        raise DataError(
            f"slot {slot} has {len(x)} samples, batch-size = {bench.config.batch_size}: so many at most where a node's "
            f"own config names the stream; make batch-size larger"
        )
    bench.look_at(client, x)
    return x.to(bench.device), None if y is None else torch.from_numpy(y)


def _with_prefix(request: ConfigRecord, prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in request.items() if key.startswith(prefix)}


def _recall(bench: Workbench, client: str, known: Remembered) -> tuple[Cursor, dict[str, Tensor]]:
    """Put a client's own state into the adapters; return where it stands, and what they have predicted lately.

    Absent parts are those of a new client.
    """
    bench.adapter.identity = (bench.config.seed, client)
    bench.adapter.proven = known.cursor.seen != NO_SLOT  # where each message is a process, a step is not taken again
    parts = {part: from_arrays(record) for part, record in known.parts.items()}
    bench.adapter.load_local_state(parts.get("local", {}))
    if bench.lone is not None:
        bench.lone.identity, bench.lone.proven = bench.adapter.identity, bench.adapter.proven
        bench.lone.load_adapted_state(parts.get("lone") or bench.initial)
        bench.lone.load_local_state(parts.get("lone-local", {}))
    # Nobody asks what the adapter alone has come to, but for its reset.
    followed = ["tta", "lone"] if bench.lone is not None and bench.config.reset == "collapse" else ["tta"]
    sums = dict.fromkeys(followed, collapse.no_predictions(bench.classes, bench.device))
    for key, kept in parts.get("predicted", {}).items():
        if key in sums and kept.shape == sums[key].shape:  # a state file of another version may hold others
            sums[key] = kept.to(bench.device)
    return known.cursor, sums


def _memory(bench: Workbench, cursor: Cursor) -> Remembered:
    """Return what a client must find again at its next visit."""
    parts = {"local": bench.adapter.local_state()}
    if bench.lone is not None:
        parts |= {"lone": bench.lone.adapted_state(), "lone-local": bench.lone.local_state()}
    return Remembered(cursor, {part: to_arrays(state) for part, state in parts.items()})
