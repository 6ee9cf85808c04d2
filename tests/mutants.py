"""Small faults in the sources, each of which the tests named beside it have to catch.

    python -m tests.mutants [--only NAME ...] [--list]

Each is planted in a copy of the tracked files, and its tests run there: a survivor is a wrong
number that nobody would notice. Before that all tests run once without a fault. The status is 1
where a mutant survives or its tests fail without it, 2 where a text is not in its file exactly
once. In MUTANTS a line that begins with @ names a file and the tests of what follows, below tests/
and without .py: files, file::the beginning of functions, or `matrix[CASE]` of tests/layouts. Then

    its name | its tests, if they are others
    # a reason, where it is not obvious
    - text that is in the file exactly once, of one line or several
    + what stands in its place

A rewrite of the sources moves the texts along. EQUIVALENT lists, with the reason, what changes no
result; none of these runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HANGS = 1800.0  # seconds after which the tests of a mutant are ended: it is caught, and said
MATRIX = "layouts/test_matrix::test_a_layout_equals_one_process_and_divides_the_work["
VERDICTS = {0: "SURVIVED", 1: "caught", 2: "caught", None: "hangs"}  # by pytest's status


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    tests: tuple[str, ...]  # as pytest takes them
    reason: str
    text: str
    replacement: str

    def patched(self) -> str:
        """The file with the fault. Raises ValueError where the text is not there exactly once."""
        source = (ROOT / self.file).read_text()
        if (found := source.count(self.text)) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {found} times")
        return source.replace(self.text, self.replacement)


def parse(listed: str) -> list[Mutant]:
    mutants, file, default = list[Mutant](), "", ""
    for entry in re.split(r"\n(?![-+#])", listed.strip()):
        head, *lines = entry.split("\n")
        name, _, tests = (each.strip() for each in head.partition("|"))
        if name.startswith("@"):
            file, default = name.removeprefix("@ "), tests
            continue
        marked = ("\n".join(line[2:] for line in lines if line[0] == mark) for mark in "#-+")
        ids = tuple(each for test in (tests or default).split() for each in node_ids(test))
        mutants.append(Mutant(name, file, ids, *marked))
    return mutants


def node_ids(test: str) -> Iterator[str]:
    file, _, name = re.sub(r"^matrix\[", MATRIX, test).partition("::")
    path = Path("tests", f"{file}.py")
    if "[" in name or not (name and (ROOT / path).is_file()):
        yield f"{path}::{name}" if name else str(path)
        return
    found = re.findall(rf"^def ({name}\w*)", (ROOT / path).read_text(), re.MULTILINE)
    yield from (f"{path}::{each}" for each in found or [name])


def environment(folder: Path) -> dict[str, str]:
    kept = {"PYTHONDONTWRITEBYTECODE": ""}  # what was compiled once is not compiled for each mutant
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **kept}


def copy_tree(folder: Path) -> None:
    """The tracked files, as they are in the working tree, and the environment. Raises RuntimeError
    where it is not the copy that is imported there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".venv").exists():
        (folder / ".venv").symlink_to(ROOT / ".venv")
    words = [sys.executable, "-c", "import megatron.config.checks as own; print(own.__file__)"]
    own = subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True)
    if Path(own.stdout.decode().strip()) != folder / "megatron/config/checks.py":
        raise RuntimeError(f"another megatron than that of the copy is imported: {own}")


def run_tests(
    folder: Path, tests: tuple[str, ...], *options: str, limit: float | None = HANGS
) -> tuple[int | None, str]:
    """(pytest's status, or None where it had to be ended; what it printed)."""
    words = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*words, *options, *tests],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, output.decode(errors="replace")


def write(file: Path, text: str) -> None:
    """Also what Python has compiled of it goes, which it tells by second and size alone."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def failing(folder: Path, mutants: list[Mutant]) -> set[str]:
    """The tests of the mutants that fail, or are not there, without any of them."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    status, output = run_tests(folder, tests, "--tb=short", "-rfE", limit=None)
    if status == 0:
        return set()
    print(output)
    names = re.findall(r"^(?:FAILED|ERROR:?) (?:not found: )?(.*)$", output, re.MULTILINE)
    return {test for test in tests if any(test in name for name in names)} or {*tests}


def run(mutants: list[Mutant]) -> int:
    survivors, wrong = [], []
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary).resolve()
        copy_tree(folder)
        broken = failing(folder, mutants)
        for mutant in mutants:
            start, file, output = time.monotonic(), folder / mutant.file, ""
            if bad := broken & {*mutant.tests}:
                verdict = f"error: without it fails {', '.join(bad)};"
            else:
                write(file, mutant.patched())
                status, output = run_tests(folder, mutant.tests, "-x", "--tb=line")
                write(file, (ROOT / mutant.file).read_text())
                verdict = VERDICTS.get(status, f"error: pytest ends with {status};")
            survivors += [mutant.name] * (verdict == "SURVIVED")
            if verdict.startswith("error"):
                wrong.append(mutant.name)
                print(output)
            print(f"{verdict:8} {mutant.name} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(mutants)} mutants, {len(survivors)} survived: {' '.join(survivors) or 'none'}")
    return 1 if survivors or wrong else 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    given = parser.parse_args(words)
    mutants, equivalent = parse(MUTANTS), parse(EQUIVALENT)
    if unknown := {*(given.only or ())} - {each.name for each in mutants}:
        parser.error(f"--only: no mutant is named {' '.join(sorted(unknown))}")
    chosen = [each for each in mutants if not given.only or each.name in given.only]
    if given.list:
        for each in chosen:
            print(f"{each.name}: {each.file}: {' '.join(each.tests)}")
        for each in equivalent:
            print(f"{each.name}: {each.file}: equivalent, not run: {each.reason}")
        return 0
    lost = []
    for each in [*chosen, *equivalent]:
        try:
            each.patched()
        except ValueError as error:
            lost.append(str(error))
    if lost:
        print("\n".join(lost), file=sys.stderr)
        return 2
    return run(chosen)


MUTANTS = r"""
@ megatron/parallel/collectives.py | parallel/test_collectives
all-reduce-non-contiguous
- block = _block(x)
-     _call("all_reduce"
+ block = x
+     _call("all_reduce"
gather-non-contiguous | parallel/test_collectives::test_backends
- _ALL_GATHER, whole, x.contiguous())
+ _ALL_GATHER, whole, x)
reduce-scatter-non-contiguous
- _REDUCE_SCATTER, rows, x.contiguous())
+ _REDUCE_SCATTER, rows, x)
send-non-contiguous
- block, calls = x.contiguous(), axis.channels
+ block, calls = x, axis.channels
receive-non-contiguous
- block, calls = _block(x), axis.channels
+ block, calls = x, axis.channels
send-from-the-device | parallel/test_collectives::test_messages
- block = block.to("cpu", copy=True)
+ pass
receive-on-the-device | parallel/test_collectives::test_messages
- block = torch.empty_like(block, device="cpu")
+ pass
gather-from-non-contiguous | parallel/test_collectives::test_backends
- shard = x.detach().contiguous()
+ shard = x.detach()
waits-for-what-begins | parallel/test_buckets::test_the_sum_of_f
# the right numbers without any overlap
- work = collective(block, *inputs, group=axis.group, async_op=True)
+ work = collective(block, *inputs, group=axis.group, async_op=True)
+     work.wait()
compiled-block-of-another-rank | train/test_watch::test_collectives_are_compiled
- _traced("broadcast", x, source, axis=axis)
+ _traced("broadcast", x, 0, axis=axis)
@ megatron/parallel/regions.py | parallel/test_collectives
f-overwrites-its-gradient | parallel/test_collectives::test_f_leaves
# a reader of dy beside f would see the sum over ranks
- own = dy.clone(memory_format=torch.contiguous_format)
+ own = dy
@ megatron/parallel/layers.py | matrix[tensor=2,sequence-gpt2]
row-bias-not-partial
- x_columns=mesh.tensor, db_partial=(mesh.stream,), after=g)
+ x_columns=mesh.tensor, after=g)
row-bias-added-by-each-rank | parallel/test_layers::test_layers_equal
- bias, sequences = None if self.after else self.bias, len(x)
+ bias, sequences = self.bias, len(x)
norm-gradient-not-summed
- if is_inside else mesh.partial_axes
+ if is_inside else (mesh.replicas,)
column-wrong-group | parallel/test_layers::test_layers_equal
- Gathered(x=Cut(0, mesh.stream, mesh.tensor))
+ Gathered(x=Cut(0, mesh.stream, mesh.data))
norms-decay | optim/test_adam::test_biases_and_norms
- fill=1, decay=False, partial=summed_over)
+ fill=1, partial=summed_over)
rms-norms-decay | parallel/test_sharding::test_matrices
- fill=1, decay=False, partial=summed_over)
+ fill=1, partial=summed_over)
@ megatron/parallel/layers_llama.py | parallel/test_layers::test_rotary
key-value-head-modulo | parallel/test_layers::test_layers_equal
- used = [query * key_value_heads // heads for query in own]
+ used = [query % key_value_heads for query in own]
plan-heads-of-the-first-queries | matrix[tensor=4-hf-llama-padded]
- own = range(axis.rank * share, (axis.rank + 1) * share)
+ own = range(share)
rotary-interleaved
- (first, second), (one, two) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
+ first, second, one, two = x[..., ::2], x[..., 1::2], y[..., ::2], y[..., 1::2]
@ megatron/parallel/kernels.py | train/test_compiled::test_layers_of_a_gpu_sum_by_sequence
bias-of-the-first-sequence-alone
- .sum(1, dtype=wide).sum(0).to(x.dtype)
+ .sum(1, dtype=wide)[0].to(x.dtype)
@ megatron/parallel/axes.py | parallel/test_mesh::test_unions_of
depth-not-reduced
- "replicas": ("data", "context", *copies),
+ "replicas": ("data", "context"),
@ megatron/parallel/ring.py | parallel/test_ring::test_a_ring_equals_the_whole
ring-turns-the-other-way
- source = (rank - step) % self.axis.size
+ source = (rank + step) % self.axis.size
ring-keeps-only-the-last-term-of-dk-and-dv
- d_kv += wait_for_d_kv()
+ wait_for_d_kv()
ring-log-sum-exp-of-the-last-block
- lse.copy_(total)
+ lse.copy_(part_lse)
ring-positions-of-the-chunks-swapped
- rank, 2 * self.axis.size - 2 - rank)
+ 2 * self.axis.size - 1 - rank, rank - 1)
ring-dropout-by-local-columns
- chunk * half)
+ first)
ring-whole-rows-look-nowhere | parallel/test_ring::test_a_query_that_may_look_nowhere
- lse.masked_fill_(nowhere, 0.0)
+ pass
ring-computes-what-no-query-sees | parallel/test_ring::test_every_rank
- visible = rows.stop if is_diagonal else last_column
+ visible = last_column
@ megatron/parallel/ring_kernels.py | parallel/test_ring::test_a_ring_equals_the_whole
ring-hides-by-minus-infinity
- torch.finfo(dtype).min / 2)
+ -torch.inf)
@ megatron/parallel/context.py | parallel/test_context::test_documents_and_padding
tokens-of-the-last-rank-first
-     return chunks
+     return chunks[::-1]
ulysses-heads-numbered-by-tensor-rank
- self.head_rank = self.head_rank * mesh.context.size + mesh.context.rank
+ pass
ring-documents-of-other-tokens
- return Visible(starts=self.take(starts))
+ return Visible(starts=starts[:, : starts.shape[1] // self.axis.size])
documents-see-each-other | models/test_huggingface::test_logits
- same_document = document_starts[:, :, None] == document_starts[:, None, :]
+ same_document = document_starts[:, :, None] >= document_starts[:, None, :]
padding-is-attended-to | tasks/test_finetune::test_loss_is_the_mean
- return is_real.view(-1, 1, 1, is_real.shape[-1])
+ return (is_real | True).view(-1, 1, 1, is_real.shape[-1])
gradient-of-one-context-rank | parallel/test_context::test_sums
- Pair.apply(x, self._sum, self._sum)
+ Pair.apply(x, self._sum, lambda dy: dy)
@ megatron/data/batch.py | parallel/test_context::test_documents_and_padding
labels-in-the-order-of-the-sample
- arrays[name] = array[..., order]
+ arrays[name] = array[..., order if name != "labels" else slice(len(order))]
@ megatron/train/step.py | matrix[context=2-gpt2]
counts-of-one-context-rank
- return all_reduce(sums, mesh.loss)
+ return all_reduce(sums, mesh.batch)
@ megatron/parallel/axes.py | matrix[context=2-gpt2]
gradients-of-own-tokens
- "replicas": ("data", "context", *copies),
+ "replicas": ("data", *copies),
@ megatron/parallel/dropout.py | parallel/test_dropout::test_the_stream
masks-by-local-rows
- own_rows(require_keys(keys), self.stream)
+ require_keys(keys)[: x.shape[:-1].numel()]
@ megatron/parallel/cross_entropy.py | parallel/test_cross_entropy
padding-in-the-softmax
- real = exponentials[:, :columns]
+ real = exponentials
last-chunk-lost
- for start in range(0, tokens, length):
+ for start in range(0, tokens - length + 1, length):
maximum-over-padding | parallel/test_cross_entropy::test_real_logits
- maximum = logits[:, :columns].amax(dim=1).to(wide)
+ maximum = logits.amax(dim=1).to(wide)
@ megatron/parallel/sharding.py | parallel/test_buckets::test_the_norm_of_all_shards
norm-counts-copies
- return all(axis.rank == 0 for axis in self.copied_over(*axes))
+ return True
@ megatron/parallel/traced.py | train/test_compiled::test_a_compiled_backward_may_leave
compiled-backward-is-whole
- if view.deferral.is_on:
+ if False:
deferred-memory-of-the-graph
- dy, x = dy.clone(), x.clone()
+ pass
@ megatron/parallel/bucket.py | checkpoint/test_layouts::test_every_tensor_is
zero-boundary-off-by-one
- stop = max(min(view.stop, self.part.stop), start)
+ stop = max(min(view.stop, self.part.stop - 1), start)
micro-batch-overwrites-matmul | optim/test_adam::test_three_steps
- accumulate=self.is_filled)
+ accumulate=False)
@ megatron/parallel/buckets.py | parallel/test_buckets
small-gradients-of-the-last-micro-batch-alone | parallel/test_buckets::test_bf16_gradients
- (torch._foreach_add_ if is_filled else torch._foreach_copy_)(totals
+ torch._foreach_copy_(totals
sums-wait-for-norms-of-all-layers | tools/plan/test_derived::test_a_step_with_zero
- alike.sort(key=lambda each: numbers[each[1][-1][0]])
+ pass
tie-not-summed | matrix[pipeline=2-gpt2-accumulate-whole-logits]
- bucket.add_up(is_of_stages=True)
+ pass
waits-for-each-bucket | parallel/test_buckets::test_reduction_overlaps
- bucket.reduce()
-         self.next += 1
+ bucket.reduce()
+         bucket.wait()
+         self.next += 1
zero-bubble-loses-a-weight | matrix[pipeline=4,schedule=zb-h1-gpt2-accumulate]
- for view, work in deferred:
+ for view, work in deferred[1:]:
@ megatron/parallel/offload.py | parallel/test_offload::test_an_activation_is_copied
offload-ignores-versions
# a layer that writes in place keeps both values
- (copy := copies.get(tensor._version)) is None
+ (copy := next(iter(copies.values()), None)) is None
@ megatron/parallel/schedules.py | parallel/test_schedules::test_a_schedule_of_ones_own_that
custom-schedule-not-proven
- if not any(check(self.custom_schedule, self.virtual).in_flight):
+ if not self.custom_schedule:
@ megatron/parallel/schedules.py | parallel/test_schedules::test_the_check_proves_the_formulas
warm-up-off-by-one
- warm_up = micro_batches if kind == "gpipe" else ranks - rank - 1
+ warm_up = micro_batches if kind == "gpipe" else ranks - rank
@ megatron/parallel/schedules.py | train/test_pipelining::test_virtual_stages
virtual-stages-of-neighbours
- self.layers[rank :: self.ranks]
+ self.layers[rank * self.virtual : (rank + 1) * self.virtual]
@ megatron/train/executor.py | matrix[pipeline=2-gpt2-accumulate-whole-logits]
stale-receive-buffer
- buffers = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in like]
+ known = vars(self)
+         buffers = [
+             known.setdefault(str(x.shape), torch.empty(x.shape, dtype=x.dtype, device=device))
+             for x in like
+         ]
@ megatron/train/compiled.py | train/test_compiled::test_graph
graph-reads-old-counts
- held.copy_(counts)
+ pass
graph-reads-old-batches
- getattr(batch, name).copy_(*to_device(held.device, array))
+ pass
graph-of-other-shapes
- if shapes != self.shapes:
+ if not self.shapes:
graph-of-a-shape-that-never-ran
- self.shapes, self.runs, self.replay, self.totals = shapes, 0, None, None
+ self.shapes, self.replay, self.totals = shapes, None, None
@ megatron/models/gpt.py | train/test_compiled::test_graph
rows-of-an-evaluation-alone
- if self.training and self.drops
+ if not self.training and self.drops
@ megatron/train/step.py | train/test_step
denominator-times-ranks | train/test_step::test_a_rank_may_have
- return all_reduce(sums, mesh.loss)
+ return all_reduce(sums, mesh.loss) * mesh.loss.size
loss-scale-left-in-the-norm | train/test_step::test_the_loss_scale
- norm = rounded_sqrt(squares) / torch.full_like(squares, scaler.scale)
+ norm = rounded_sqrt(squares)
the-host-reads-before-the-update | test_gpu_script::test_the_tests_of_a_gpu
-     state.mark("optimizer")
+     read()
+     state.mark("optimizer")
loss-scale-left-in-the-update | train/test_step::test_the_loss_scale
- state.optimizer.step(lr, 1.0 / scaler.scale, checked
+ state.optimizer.step(lr, 1.0, checked
vote-before-the-backward | train/test_step::test_all_ranks_stop
- run = forward_backward if state.graph is None
+ asked = wants_stop()
+     wants_stop = lambda: asked
+     run = forward_backward if state.graph is None
skipped-step-decays | train/test_step::test_skipped_step
-     state.step += 1
+     if overflowed:
+         for each in sum(state.optimizer.optimizers[0].groups.values(), []):
+             each.weight.data.mul_(1 - lr * each.decay)
+     state.step += 1
update-by-a-loss-that-is-not-finite | train/test_step::test_all_ranks_skip
- norm.where(counts[1:].all() & (bad == 0), nan)
+ norm.where(counts[1:].all(), nan)
update-without-a-token | train/test_step::test_a_batch_without
- norm.where(counts[1:].all() & (bad == 0), nan)
+ norm.where(bad == 0, nan)
tokens-counted-by-samples | train/test_step::test_the_loss_is
- units = each.num_tokens if is_counted
+ units = each.num_samples if is_counted
@ megatron/train/loop.py | train/test_loop::test_it_logs
rate-of-the-update-before
- loop.learning_rate(state.updates + 1)
+ loop.learning_rate(state.updates)
@ megatron/train/loop.py | train/test_callbacks::test_methods_are_called_in_order
last-callback-misses-evaluations
-             call(callbacks, "post_evaluation", loss)
+             call(callbacks[:-1], "post_evaluation", loss)
@ megatron/train/callbacks.py | train/test_callbacks::test_a_stop_that_one_rank_asks_for
stop-that-nobody-hears
-         self._signals.ask(reason)
+         self.log(reason)
@ megatron/train/monitors.py | train/test_callbacks::test_callbacks_of_a_run_change_no_number
throughput-waits-for-the-device
-         self.tokens += result.tokens
+         self.tokens += __import__("torch").tensor(result.tokens).item()
@ megatron/train/metrics.py | train/test_callbacks::test_an_error_of_a_callback_ends_the_run
errors-of-callbacks-end-them-alone
-                 if not each.may_fail:
+                 if False:
@ megatron/train/metrics.py | train/test_callbacks::test_an_error_on_one_rank_ends_the_program
error-line-for-collectives
-             if each in self._closed or (self._is_leaving and not each.may_fail):
+             if each in self._closed:
@ megatron/train/callbacks.py | train/test_callbacks::test_pauses_within_pauses
nested-pauses-count-twice
- * (self._pauses == 0)
+ * 1
@ megatron/train/monitors.py | train/test_utilization::test_phases_of_a_step
phases-of-the-step-of-the-line
-         self.timed, self.running = self.running or self.timed, None
+         self.timed, self.running = None, None
@ megatron/train/utilization.py | train/test_utilization::test_flops_are_those
lookups-are-matmuls
-         if is_weight and name not in tables and spec.is_owner():
+         if is_weight and spec.is_owner():
@ megatron/inference/samples.py | inference/test_samples::test_the_text_is_that_of_generation
logits-of-the-token-before
-     last = torch.from_numpy(lengths - 1)
+     last = torch.from_numpy((lengths - 2).clip(0))
@ megatron/inference/samples.py | inference/test_samples::test_the_text_is_that_of_generation
samples-of-the-first-stage
-     all_reduce(logits, stage)
+     logits
@ megatron/inference/samples.py | inference/test_samples::test_the_text_is_that_of_generation
samples-in-training-mode
-         model.train(was_training)
+         model.train(False)
@ megatron/train/state.py | checkpoint/test_layouts::test_a_run_goes_on
skipped-steps-correct-the-bias | checkpoint/test_layouts::test_counts_and_the_loss
# Adam's bias correction after a resume of a run that skipped
- self.optimizer.loaded(self.updates)
+ self.optimizer.loaded(self.step)
bias-correction-off-by-one-on-resume
- self.optimizer.loaded(self.updates)
+ self.optimizer.loaded(self.updates + 1)
@ megatron/train/evaluate.py | matrix[data=2-gpt2]
leftover-counts-everywhere
- (local[even:] or range(1), len(local) > even)
+ (local[even:] or range(1), True)
@ megatron/train/replicas.py | train/test_replicas::test_a_flipped_bit
replica-check-forgets
- outcome[1] |= (largest != ~smallest).any()
+ outcome[1] = (largest != ~smallest).any()
@ megatron/train/pretrain.py | test_faults::test_two_halves
order-shifted-by-one-on-resume
- config.global_batch_size(mesh.size()), run.state.samples
+ config.global_batch_size(mesh.size()), run.state.samples + (run.state.step > 0)
@ megatron/train/inputs.py | train/test_inputs::test_steps_hold
masks-by-place-in-the-batch
- .numbered(np.array(each))
+ .numbered(np.arange(len(each)))
@ megatron/optim/by_name.py | optim/test_by_name
gradients-keep-the-loss-scale | optim/test_by_name::test_three_steps
- torch._foreach_mul_(self.gradients, factor)
+ pass
state-of-a-fresh-optimizer-on-resume | optim/test_by_name::test_a_resumed_state
- self.step(0.0, 1.0)
+ pass
one-rate-for-all-groups | optim/test_by_name::test_a_group
- group["lr"] = lr * share
+ group["lr"] = lr
steps-counted-from-0-on-resume | optim/test_by_name::test_a_resumed_state
- step.fill_(updates)
+ step.fill_(0)
padding-in-the-mean-of-rows | optim/test_by_name::test_three_steps
- local, gradient = (spec.real(x).view(shape) for x in (local, gradient))
+ local, gradient = (x.view(shape) for x in (local, gradient))
whole-matrices-where-they-are-cut | optim/test_by_name::test_a_layout
- if needs != "elements" and cuts:
+ if False:
@ megatron/config/presets.py | config/test_parse config/test_parts
line-numbers-from-0
- splitlines(), 1)
+ splitlines(), 0)
@ megatron/optim/adam.py | optim/test_adam
one-moment-zeroed-on-resume | checkpoint/test_layouts::test_a_run_goes_on
- each.set_updates(updates)
-         self.publish()
+ each.set_updates(updates)
+         self.moments[-1][0].zero_()
+         self.publish()
a-failed-step-publishes-its-masters | train/test_diagnose::test_the_rank_at_fault
- for number in numbers if is_sound() else ():
+ for number in numbers:
clip-scales-up | optim/test_adam::test_five_steps
- clip.clamp(max=1.0)
+ clip
compiled-update-leaves-the-weights | optim/test_adam::test_the_compiled_update_rounds
- if part.half is not None:
+ if False:
skipped-update-is-made | optim/test_adam::test_the_compiled_update_is_torch_s
- found_inf=is_skipped.float(),
+ found_inf=None,
skipped-update-is-counted | optim/test_adam::test_the_compiled_update_is_torch_s
- config, is_zero = self.config, factor == 0
+ config, is_zero = self.config, factor == 0
+         for each in self.updates:
+             each += is_zero
unclipped-update-made-twice | optim/test_adam::test_pure_bf16
- is_zero | (factor == 1)
+ is_zero
adam-epsilon-ignored | optim/test_adam::test_five_steps
- eps=config.adam_eps,
-                     maximize
+ eps=1e-8,
+                     maximize
first-beta-ignored | optim/test_adam::test_five_steps
- beta1=config.adam_beta1,
+ beta1=0.9,
filled-masters-are-rounded | examples/test_examples::test_a_model_on_meta
- whole.detach(), spec
+ whole.detach().to(parameters[name].dtype), spec
@ megatron/optim/compiled.py | optim/test_adam::test_the_compiled_update
skipped-compiled-update-is-made
- torch.where(factor != 0, new.to(old.dtype), old)
+ new.to(old.dtype)
skipped-compiled-update-is-counted
- self.updates += factor != 0
+ self.updates += 1
@ megatron/optim/schedule.py | optim/test_schedule
decay-off-by-one
- max(0.0, (update - start) /
+ max(0.0, (update - start - 1) /
wsd-decays-from-the-warm-up
- max(warmup, end - decay)
+ warmup
@ megatron/data/gpt2.py | data/test_gpt2
labels-not-shifted
- for each in (window[:, :-1], window[:, 1:]))
+ for each in (window[:, :-1], window[:, :-1]))
positions-not-reset
- positions=offsets - starts if self.reset_position_ids else offsets,
+ positions=offsets,
last-label-of-the-next-split
- max(0, len(self.tokens) - 1) // self.seq_length
+ len(self.tokens) // self.seq_length
@ megatron/data/padded.py | data/test_padded
begin-token-twice
- return [*self.begin, *ids, *self.end]
+ return [*self.begin, *self.begin, *ids, *self.end]
@ megatron/data/cache.py | data/test_documents
cache-of-another-key
- is_current = key in (None, footer["key"])
+ is_current = True
@ megatron/data/order.py | data/test_order
one-order-for-all-epochs
- ^ epochs.astype(np.uint64))
+ ^ np.zeros_like(epochs).astype(np.uint64))
split-bounds-rounded | data/test_order::test_the_splits
- bounds = [floor(documents *
+ bounds = [round(documents *
@ megatron/data/bert.py | data/test_bert
mask-share-of-words
- MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
+ MASK_SHARE, RANDOM_SHARE = 0.9, 0.1
order-of-segments-exchanged
- is_swapped=np.array([sample.pair.is_swapped for
+ is_swapped=np.array([not sample.pair.is_swapped for
@ megatron/models/gpt.py | models/test_gpt2
loss-mask-ignored | train/test_step::test_the_loss_is
- batch.loss_mask.double() * loss_scales)
+ torch.ones_like(batch.loss_mask).double() * loss_scales)
@ megatron/models/gpt.py | parallel/test_sharding::test_matrices
selective-recomputes-nothing | layouts/test_matrix::test_one_process_takes
- self.maybe_checkpoint = maybe_checkpoint(config, factory, "selective")
+ self.maybe_checkpoint = _call
mlp-of-another-std
- self.up = factory.column(h, f, parts=parts, bias=bias, std=std)
+ self.up = factory.column(h, f, parts=parts, bias=bias, std=0.02)
@ megatron/models/vit.py | models/test_vit matrix[tensor=2,sequence-vit-mean-accumulate-full]
vit-the-mean-of-local-rows
- x = self.gather(self.final_norm(x))
+ x = self.final_norm(x)
vit-an-image-is-mirrored-before-its-crop | models/test_vit::test_crops
- columns = torch.where(flips[:, None], size - 1 - columns, columns)
+ columns = torch.where(flips[:, None], columns, size - 1 - columns)
vit-the-deviation-of-another-color | models/test_vit::test_three_steps
- pixels = torch.stack([(color - mean) / std for color, mean, std in facts], 1).to(dtype)
+ pixels = torch.stack([color / std - mean for color, mean, std in facts], 1).to(dtype)
vit-a-patch-row-by-row-of-channels | models/test_vit::test_three_steps
- .permute(0, 2, 4, 1, 3, 5)
+ .permute(0, 2, 4, 1, 5, 3)
vit-the-worst-of-the-scores | models/test_vit::test_accuracy
- best = scores.topk(min(5, scores.shape[1]), dim=1).indices
+ best = scores.topk(min(5, scores.shape[1]), dim=1, largest=False).indices
@ megatron/parallel/layers.py | matrix[tensor=4:2d-vit-accumulate-dropout]
vit-the-position-table-along-the-wrong-dim
- shape, shards = (positions, hidden_size), over(1, mesh.hidden)
+ shape, shards = (positions, hidden_size), over(0, mesh.hidden)
vit-the-class-token-counted-per-rank
- self.add_parameter("weight", shape, shards, std=std, partial=mesh.partial_axes)
+ self.add_parameter("weight", shape, shards, std=std, partial=mesh.partial_axes[:1])
@ megatron/data/images.py | data/test_images
images-changes-of-the-seed-alone
- bits = mix(mix(np.array([self.seed], np.uint64)) ^ np.asarray(numbers, np.uint64))
+ bits = mix(mix(np.array([self.seed], np.uint64)) ^ np.asarray(numbers, np.uint64) % 2)
images-the-mean-of-the-last-chunk
- sums[channel] += sum(value * n for value, n in enumerate(numbers))
+ sums[channel] = sum(value * n for value, n in enumerate(numbers))
@ megatron/huggingface/model.py | models/test_unmodified::test_compiled_layers
plan-a-recomputed-input-is-kept
- each.close()
+ pass
@ megatron/huggingface/replacements.py | models/test_unmodified::test_compiled_layers
plan-a-class-for-each-norm
- @cache  # one class for all modules of a class, so that their layers share a compiled graph
+ # a class for each module
@ megatron/huggingface/replacements.py | models/test_unmodified::test_unmodified_models_compute
attention-scaling-ignored
- query = query * (scaling * size**0.5)
+ pass
@ megatron/huggingface/proof.py | tools/layouts/test_prove::test_corrupted
proof-of-the-first-rank-alone | tools/layouts/test_prove::test_what_one_rank
- ranks = mesh.control.gather(own)
-     failures
+ ranks = mesh.control.gather(own)[:1]
+     failures
@ megatron/checkpoint/format.py | checkpoint/test_faults::test_what_is_damaged
verify-ignores-checksums
- if sha256(path / name) != facts["sha256"]:
+ if sha256(path / name) is None:
a-longer-file-is-readable | checkpoint/test_resume::test_a_damaged_newest
- .st_size) != facts["bytes"]
+ .st_size) < facts["bytes"]
@ megatron/checkpoint/load.py | checkpoint/test_layouts::test_every_tensor
slice-off-by-one
- min(offset + size, cut.stop)
+ min(offset + size, cut.stop - (cut.start > 0))
@ megatron/checkpoint/memory.py | checkpoint/test_memory::test_the_newest_whole_step
memory-is-not-hashed
- whole = [name for name, line in lines.items() if not line]
+ whole = [*lines]
step-of-one-host-is-taken
- missing = [name for name in chosen["files"] if name not in holders]
+ missing = [name for name in ("manifest.json",) if not holders]
memory-behind-the-disk-is-taken
- if step <= newest:
+ if step < 0:
partner-is-the-host-itself
- partners = self._hosts[(host + 1) % number]
+ partners = self._hosts[(host + number) % number]
memory-of-any-path | checkpoint/test_memory::test_a_copy_of_the_folder
- name = f"{start_id} {self._save.resolve()}"
+ name = start_id
former-step-goes-before-the-new-one-is-whole | checkpoint/test_memory::test_a_kill_at_any_call
- step_folders(self._folder)[1:]
+ step_folders(self._folder)
each-host-has-its-own-facts | checkpoint/test_memory::test_one_host_of_three
- facts = mesh.control.gather(dict(facts) if mesh.is_first else None)[0]
+ facts = dict(facts)
copy-that-failed-stays | checkpoint/test_memory::test_a_copy_that_fails
- rmtree(self._path(step), ignore_errors=True)
+ pass
damaged-step-on-disk-counts | checkpoint/test_memory::test_a_damaged_step
- newest_whole(on_disk, self._mesh, any_loop=True)
-                 newest = step_of(whole_one.path)
+ [], []
+                 newest = step_of(on_disk[0])
memory-waits-for-the-flag | checkpoint/test_memory::test_a_start_without_the_flag
- if config.save is None:
+ if config.save is None or config.memory_checkpoint_interval is None:
@ megatron/train/monitors.py | checkpoint/test_memory::test_a_drifted_replica
memory-is-not-checked
- check_replicas(state, done, self.checked, training.is_urgent)
+ pass
@ megatron/checkpoint/save.py | checkpoint/test_save::test_everything
shard-not-flushed
- os.fsync(stream.fileno())
+ pass
renames-not-flushed
- staging.rename(final)
-     flush_path(final.parent)
+ staging.rename(final)
latest-before-the-checkpoint | checkpoint/test_faults::test_a_failed_save_leaves
- notes = set_aside(final, went_back_to)
-     staging.rename(final)
+ write_atomically(final.with_name("latest"), f"{final.name}\n".encode())
+     notes = set_aside(final, went_back_to)
+     staging.rename(final)
checkpoint-follows-the-training | checkpoint/test_save::test_an_asynchronous_save
# a save beside training copies the tensors before the next step
- self._host[each.key].copy_(each.local, non_blocking=True)
+ self._host[each.key] = each.local
an-error-waits-for-ever-for-a-save | checkpoint/test_faults::test_error_in
- self.close(None if error is None else GRACE)
+ self.close()
@ megatron/inference/generate.py | inference/test_generate
top-k-off-by-one | inference/test_generate::test_the_distribution_is
- scaled.topk(sampling.top_k if is_cut
+ scaled.topk(sampling.top_k + 1 if is_cut
top-p-takes-one-more | inference/test_generate::test_top_p
- before >= sampling.top_p
+ before > sampling.top_p
end-mark-ignored | inference/test_generate::test_a_text_ends_at
- if not (token in ends or is_full
+ if not (is_full
padding-of-the-vocabulary-is-drawn | inference/test_generate::test_padding
- gather_from(logits, -1, mesh.vocabulary)[:, : model.vocab_size]
+ gather_from(logits, -1, mesh.vocabulary)
@ megatron/models/cache.py | inference/test_generate::test_the_logits_of_each_step
cache-position-off-by-one
- self.length += columns
+ self.length += columns - (self.length > 0)
@ tasks/protocol.py | tasks/test_score::test_sliding_windows
window-off-by-one
- done = self.length + (number - 1) * self.stride if number else 0
+ done = self.length + (number - 1) * self.stride - 1 if number else 0
epochs-of-a-search-are-fractions | tasks/test_finetune::test_search
- is_whole = name in ("global_batch_size", "epochs")
+ is_whole = name == "global_batch_size"
@ tasks/wikitext103.py | tasks/test_wikitext103::test_perplexities
perplexity-of-plain-words
- "word_perplexity": stream.perplexity(original),
+ "word_perplexity": stream.perplexity(words),
articles-without-their-mark
- Sliding(np.array([*first, *tokens], np.int32), length, length, reach_back=True)
+ Sliding(np.array(tokens, np.int32), length, length, reach_back=True)
@ tasks/lambada.py | tasks/test_lambada::test_tokenizer_json
begin-mark-twice
- tokens = np.array([*begin, *start, *ids], np.int32)
+ tokens = np.array([*begin, *begin, *start, *ids], np.int32)
last-word-by-its-last-token | tasks/test_lambada::test_words_count_whole
- "strict_accuracy": float(scores.all_hit.mean()),
+ "strict_accuracy": float(scores.last_hit.mean()),
bytes-of-passages-in-characters | tasks/test_lambada::test_figures
- "num_bytes": sum(len(each.text.encode())
+ "num_bytes": sum(len(each.text)
@ tasks/heldout.py | tasks/test_heldout::test_documents_between_marks
document-read-after-two-marks
- [*first, *each, tokenizer.eod]
+ [*first, *first, *each, tokenizer.eod]
held-out-windows-without-context
- half = max(1, length // 2)
+ half = length
@ tasks/readers/squad_data.py | tasks/test_squad::test_windows_are_labelled
answer-ends-a-token-early
- (first, after - 1) if first < after else
+ (first, max(first, after - 2)) if first < after else
@ tasks/finetune.py | tasks/test_finetune::test_optimizer
fine-tuning-does-not-decay
- weight_decay=settings.weight_decay,
+ weight_decay=0.0,
fine-tuning-clips-by-default
- clip_grad=settings.clip_grad,
+
search-takes-the-first | tasks/test_finetune::test_search
- chosen = ranked.index(max(ranked))
+ chosen = 0
skipped-steps-count-in-the-loss | tasks/test_finetune::test_a_skipped_step
-         if not result.skipped:
+         if result is not None:
@ tools/convert/gpt2.py | tools/convert/test_round_trip::test_the_round_trip
conv1d-not-transposed
- theirs[0].t().reshape(shape)
+ theirs[0].reshape(shape)
tied-head-exported-as-its-own | tools/convert/test_round_trip
- Key("tie_word_embeddings", "untie_embeddings_and_output_weights", {True: False, False: True}),
+ Key("tie_word_embeddings", "untie_embeddings_and_output_weights", {True: True, False: False}),
@ tools/convert/llama.py | tools/convert/test_round_trip::test_the_round_trip
keys-and-values-exchanged
- (f"{THEIRS}.self_attn.k_proj.weight", f"{THEIRS}.self_attn.v_proj.weight"),
+ (f"{THEIRS}.self_attn.v_proj.weight", f"{THEIRS}.self_attn.k_proj.weight"),
another-epsilon-where-none-is-said | tools/convert/test_round_trip::test_options_that
- "layernorm_epsilon", default=1e-6
+ "layernorm_epsilon", default=1e-5
@ tools/corpus/dedup/signatures.py | tools/corpus/test_dedup::test_another_seed
seed-of-the-signatures-ignored
- random = np.random.default_rng(self.seed)
+ random = np.random.default_rng(0)
@ tools/corpus/dedup/verify.py | tools/corpus/test_dedup::test_the_threshold_is
threshold-exclusive
- met = shared * threshold.denominator >= union
+ met = shared * threshold.denominator > union
@ tools/corpus/dedup/clusters.py | tools/corpus/test_dedup::test_what_stays_is
two-of-a-cluster-stay
- removed = np.flatnonzero(found.keepers != np.arange(len(found.numbers)))
+ removed = np.flatnonzero(found.keepers != np.arange(len(found.numbers)))[1:]
members-of-the-next-cluster | tools/corpus/test_dedup::test_the_manifest
- + min(SHOWN, sizes[k])]
+ + SHOWN]
@ tools/report/runs.py | tools/test_compare_runs::test_where_runs_part
first-difference-in-the-last-step
- first = next((step for step, gap in gaps.items() if gap > tolerance), None)
+ first = next((step for step, gap in [*gaps.items()][::-1] if gap > tolerance), None)
loss-that-is-no-number-is-equal | tools/test_compare_runs::test_a_value_that_is_no_number
- if a and b is not None else inf
+ if a and b is not None else 0.0
settings-of-the-last-start | tools/test_compare_runs::test_a_resumed_run
- settings_of(lines[0]) for lines in starts
+ settings_of(lines[-1]) for lines in starts
skipped-steps-are-not-compared | tools/test_compare_runs::test_what_fp16_skips
- for name in ("loss_scale", "skipped_steps")
+ for name in ("loss_scale",)
@ tools/chaos/account.py | tools/chaos/test_account::test_spans
lost-steps-are-useful
- kept = event.get("step", 0) <= life.final
+ kept = True
stop-counts-as-useful
- yield Span("stopped", begin, until)
+ yield Span(span.kind, begin, until)
repeated-steps-of-the-first-start-only | tools/chaos/test_account::test_rows
- again = max(0, max(done, default=life.loaded or 0) - restarted.loaded)
+ again = max(0, max(done, default=life.loaded or 0) - (every[0].loaded or 0))
steps-that-a-start-without-steps-kept | tools/chaos/test_account::test_steps_that_an_older
- final = final if loaded is None else min(final, loaded)
+ final = final if loaded is None else loaded
@ tools/chaos/weights.py | tools/chaos/test_account::test_weights
counters-within-the-tolerance
- b.norm().item() if is_real else 0.0
+ b.norm().item()
arrays-that-are-missing-are-equal
- for name in sorted(ours.keys() | theirs.keys())
+ for name in sorted(ours.keys() & theirs.keys())
equal-bits-of-another-dtype
- a.shape != b.shape or a.dtype != b.dtype
+ a.shape != b.shape
@ tools/chaos/schedule.py | tools/chaos/test_chaos::test_the_same_seed
every-fault-draws-the-same
- drawn.append(Fault(number, config, gap, draw.getrandbits(32)))
+ drawn.append(Fault(number, config, gap, self.seed))
@ tools/report/corpus.py | tools/corpus/test_report::test_documents_that_a_step
sources-that-pass-a-step-by-are-lost
- unread = documents(offered) - documents(counts.input)
+ unread = documents(before) - documents(counts.input)
unread-text-with-what-the-step-cut
- left = text_bytes(offered) - text_bytes(counts.input)
+ left = text_bytes(offered) - text_bytes(counts.output)
@ tools/layouts/layout.py | tools/layouts/test_compare::test_the_layout_of_settings
context-ranks-share-no-state
- copies = sizes["data"] * sizes["context"] * parallel.tensor_parallel_depth
+ copies = sizes["data"] * parallel.tensor_parallel_depth
@ tools/experiments/figure6.py | tools/experiments/test_reports::test_order_of_sizes
noise-of-one-of-two-accuracies
- error = hypot(standard_error(one, count), standard_error(other, count))
+ error = standard_error(one, count)
@ tools/experiments/results.py | tools/experiments/test_reports::test_dropout_quality
changed-sources-are-not-said
- "commit": whole[:9] + ("-dirty" if whole.endswith("-dirty") else ""),
+ "commit": whole[:9],
@ tools/experiments/finetuning.py | tools/experiments/test_commands::test_stages_depend
other-evaluation-data-is-reused
- inputs = [settings.train_data, settings.valid_data, *model]
+ inputs = [settings.train_data, *model]
@ tools/experiments/stages.py | tools/experiments/test_commands::test_evaluated_text
other-evaluations-are-not-cut-again
- clean_stage(corpus / "extract", corpus, steps, cores, inputs=evaluations)
+ clean_stage(corpus / "extract", corpus, steps, cores)
@ tools/chaos/supervise.py | tools/chaos/test_chaos::test_another_trainer
ranks-that-end-go-on
- self._end_fault(has_ended=True)
+ self._end_fault(has_ended=False)
command-outlives-chaos | tools/chaos/test_chaos::test_a_signal_ends
- start.kill()
-             self._close()
+ self._close()
@ tools/chaos/supervise.py | tools/chaos/test_supervise::test_a_fault
fault-before-all-ranks-are-there
- if not ranks or len(ranks) < start.size():
+ if not ranks:
file-that-was-read-needs-no-cause | tools/chaos/test_supervise::test_a_damaged
- int(step[1]) < int(found[1])
+ True
@ tools/chaos/faults.py | tools/chaos/test_supervise::test_a_cause
any-rank-is-the-cause
- who = rf"\branks? (?:\d+, )*{rank}\b"
+ who = r"\branks? \d"
@ tools/chaos/__main__.py | tools/chaos/test_supervise::test_a_cause
unnamed-cause-is-success
- return 3 if compared is None or unnamed else 0
+ return 3 if compared is None else 0
@ conformance/compare.py | conformance/test_run::test_rounding
later-limit-in-the-first-step
- limit = limits.first if figure == "gradient" else limits.cap
+ limit = limits.cap
@ conformance/compare.py | conformance/test_run::test_a_layout_that_is_ignored
nothing-counted-is-divided
- (not most or times >= 0.95 * min(map(least_factor, sizes)))
+ times >= 0.95 * min(map(least_factor, sizes))
half-a-layout-is-a-layout
- min(map(least_factor, sizes))
+ min(sizes)
@ conformance/worker.py | conformance/test_run::test_memory
memory-of-two-names-counts-twice
- parts[where] = number
+ parts[len(parts), where] = number
@ conformance/adapters/accelerate.py | conformance/test_adapters::test_trainers
divided-by-micro-batches-again
- self.scale = self.sizes[0] * self.accumulated
+ self.scale = self.sizes[0]
@ conformance/adapters/trainer.py | conformance/test_adapters::test_trainers
labels-shifted-twice
- batch.labels.roll(1, 1)
+ batch.labels.clone()
@ conformance/peers.py | conformance/test_peers::test_an_environment
reason-of-a-row-lost
- "reason": lack,
+ "reason": "",
@ tools/layouts/activations.py | tools/test_compare_runs::test_settings_of_the_model
compared-with-dropout
- return model.eval()
+ return model.train()
batch-from-the-start-of-the-data | tools/test_compare_runs::test_the_samples_and
- first = ours.manifest["counters"]["samples"]
+ first = 0
half-weights-in-place-of-masters | tools/test_compare_runs::test_kinds_and_layouts
- load_weights(
-         checkpoint, [TensorSlice(n, specs[n], each.detach()) for n, each in weights.items()]
-     )
+ from megatron.checkpoint.load import load_checkpoint, model_slices
+     load_checkpoint(checkpoint, model_slices(model))
outer-module-before-the-inner | tools/test_compare_runs::test_a_weight_of_layer_3
- for key in kept
+ for key in [*kept][::-1]
@ megatron/train/diagnose.py
gradients-not-seen | tools/test_compare_runs::test_a_difference_in_the_backward
- if value.requires_grad:
+ if False:
@ tools/corpus/engine.py | tools/corpus/test_faults::test_a_step_that_is_killed
a-stage-outlives-the-one-before
- fingerprint_of(self._stages_so_far, name, function.__qualname__, facts)
+ fingerprint_of(name, function.__qualname__, facts)
@ tools/corpus/urls.py | tools/corpus/test_urls::test_a_url_is
extension-in-capitals-stays
- if dot and extension.lower() in
+ if dot and extension in
a-dot-after-a-host-hides-it
- host.lower().rstrip(".")
+ host.lower()
@ tools/corpus/tokenize/encode.py | tools/corpus/tokenize/test_step::test_documents_in
end-mark-before-the-document
- np.insert(ids, np.cumsum(sizes), settings.eod)
+ np.insert(ids, np.cumsum(sizes) - sizes, settings.eod)
@ megatron/models/gpt.py | parallel/test_sharding::test_matrices
positions-of-another-std
- self.positions, h, std=std)
+ self.positions, h, std=0.02)
@ megatron/parallel/layers.py | matrix[tensor=2-gpt2]
row-mean-of-the-ranks
- y = add_bias(sum_terms(y, self.after), self.bias)
+ y = add_bias(sum_terms(y, self.after) / self.after.terms.size, self.bias)
positions-not-partial | matrix[tensor=2,sequence-gpt2]
- self.add_parameter("weight", shape, shards, std=std, partial=mesh.partial_axes)
+ self.add_parameter("weight", shape, shards, std=std)
column-computes-all-columns-too
# the right numbers by as much work as one process has
- y = linear(rows, self.weight, bias, self.division, view=view, sequences=sequences)
+ y = linear(rows, self.weight, bias, self.division, view=view, sequences=sequences)
+         kernels.matmul(rows, self.weight.flatten(0, -2).repeat(self.mesh.tensor.size, 1))
readers-of-a-returned-input-lost | matrix[tensor=4-hf-llama-padded]
- compute_dx(gathered_dys, returned_dx)
+ compute_dx(gathered_dys, [])
query-of-the-next-head | matrix[tensor=2-llama]
- k, v = k[:, kv_head_index], v[:, kv_head_index]
+ k, v = k[:, kv_head_index.roll(1)], v[:, kv_head_index.roll(1)]
@ megatron/parallel/layers_llama.py | matrix[tensor=4,sequence-llama-documents]
shared-key-value-weight-not-summed | parallel/test_layers::test_layers_equal
- shards, summed_over = (), (mesh.replicas, ranks)
+ shards, summed_over = (), (mesh.replicas,)
@ megatron/models/build.py | matrix[pipeline=2-gpt2-accumulate-whole-logits]
layers-of-other-stages-kept
- kept.update(*(layers[number] for number in pipeline.numbers(rank) or ()))
+ kept.update(*layers)
@ megatron/models/llama.py | matrix[tensor=4,sequence-llama-documents]
rotary-positions-of-local-rows
- positions = self.exchange(batch.positions)
+ positions = self.exchange(batch.positions.roll(self.final_norm.mesh.stream.rank, 1))
@ megatron/parallel/layers_grid.py | matrix[tensor=4:2d-gpt2]
grid-axes-of-a-weight-exchanged
- return Partition(division, (mesh.tokens,), mesh.hidden, mesh.hidden, (mesh.tokens,))
+ return Partition(division, (mesh.hidden,), mesh.tokens, mesh.hidden, (mesh.tokens,))
grid-bias-not-partial
- return Partition(division, (mesh.tokens,), mesh.hidden, mesh.hidden, (mesh.tokens,))
+ return Partition(division, (mesh.tokens,), mesh.hidden, mesh.hidden)
@ megatron/parallel/regions.py | matrix[tensor=4:2d-gpt2]
grid-norm-variance-of-own-columns
- variance += (means[0] - mean).square().mean(0)
+ pass
@ megatron/parallel/layers_grid.py | matrix[tensor=8:3d-bert-samples=8]
cube-leaves-as-it-enters | matrix[tensor=8:3d-gpt2-samples=8]
- division = Gathered(cut(0, mesh.output), cut(1, mesh.weight), cut(0, mesh.input))
+ division = Gathered(cut(0, mesh.input), cut(1, mesh.weight), cut(0, mesh.output))
cube-masks-of-the-samples-that-are-read
- return collectives.gather_from(x, 0, mesh.input).chunk(mesh.input.size)[mesh.output.rank]
+ return x
@ megatron/huggingface/layers.py | matrix[tensor=4-hf-llama-padded]
plan-no-sum-where-columns-begin | matrix[tensor=2-hf-gpt2-accumulate-dropout]
- Gathered(x=Cut(terms=tensor))
+ Gathered()
plan-a-sum-for-each-column-layer
- (shared.rows, shared.tokens) if shared.x is x
+ (None, shared.tokens) if shared.x is x
plan-any-tensor-is-the-shared-one | parallel/test_parallelize::test_a_cut_model
- (shared.rows, shared.tokens) if shared.x is x
+ (shared.rows, shared.tokens) if shared.x is not None
@ megatron/huggingface/parallelize.py | parallel/test_parallelize::test_layers_that_read
plan-readers-of-one-tensor-not-found
- if len(names) > 1:
+ if len(names) > 99:
@ megatron/parallel/bucket.py | matrix[data=2,zero=1-gpt2]
tie-left-unsummed | matrix[pipeline=2-gpt2-accumulate-whole-logits]
- if axis is not self.early_axis and axis.is_of_stages == is_of_stages:
+ if axis is not self.early_axis and not axis.is_of_stages and not is_of_stages:
zero-owner-off-by-one
- self.part = slice(self.shared.rank * share, (self.shared.rank + 1) * share)
+ owner = (self.shared.rank + 1) % self.shared.size
+         self.part = slice(owner * share, (owner + 1) * share)
zero-micro-batch-forgotten | matrix[data=2,zero=2-gpt2-accumulate-full]
-         if self.has_sum:
-             self.own_gradients.add_(arrived())
+         if False:
+             self.own_gradients.add_(arrived())
a-custom-sum-leaves-zero-the-first-part | config/test_parts::test_gradients
- own = total if owners.size == 1 else own_rows(total, axis)
+ own = total if owners.size == 1 else total.chunk(axis.size)[0]
zero-2-keeps-all-gradients | train/test_zero_memory::test_what_lasts
- arrived = self._start_sum(gradients, self.shared, self.shared, None)
+ vars(self)["kept"] = gradients
+         arrived = self._start_sum(gradients, self.shared, self.shared, None)
@ megatron/parallel/zero3.py | train/test_zero_memory::test_what_lasts
zero-3-keeps-all-weights | matrix[data=2,zero=3-bert]
- self.end_publish()
-         self.weights = None
+ return
+         self.weights = None
zero-3-gathers-all-layers
- bucket.start_gather_weights()
+ bucket.start_gather_weights()
+         if self.previous is not None and self.previous.previous is not None:
+             self.previous.start()
@ megatron/parallel/buckets.py | matrix[data=2,zero=1-gpt2]
zero-norm-of-one-part
- return all_reduce(total, self.shared)
+ return total
@ megatron/huggingface/config.py | train/test_utilization::test_flops
heads-as-wide-as-the-hidden-states
- head = described.get("head_dim") or self.hidden_size // self.num_attention_heads
+ head = self.hidden_size // self.num_attention_heads
all-experts-count
- if others or self.experts or not self.widths or has_window(described):
+ if others or not self.widths or has_window(described):
@ megatron/huggingface/model.py | train/test_utilization::test_flops
a-tied-head-does-not-count
- self.tied_table = names.get(id(model.get_input_embeddings()))
+ self.tied_table = None
@ megatron/train/profiling.py | train/test_profiling::test_the_part
hidden-communication-is-exposed
- for part in (*COMPUTING, *waiting) if on_gpu else (*waiting, *COMPUTING):
+ for part in (*waiting, *COMPUTING):
attention-hides-its-waits
- for part in (*COMPUTING, *waiting) if on_gpu else (*waiting, *COMPUTING):
+ for part in (*COMPUTING, *waiting):
the-last-kernels-are-no-part-of-the-step
- for each in [*steps, *on_gpu])
+ for each in steps)
evaluations-are-part-of-the-step
- before, found = seconds(covered), Parts()
+ covered, before, found = list[Event](), 0.0, Parts()
rings-are-pipelines
- is_message = axis == "pipeline" and "SendRecv" in event["name"]
+ is_message = "SendRecv" in event["name"]
waits-are-not-marked | train/test_profiling::test_the_parts_are_the_step
- self.training.clock.span = Calls.span = record_function
+ self.training.clock.span = record_function
pauses-are-not-marked | train/test_profiling::test_the_parts_are_the_step
- self.training.clock.span = Calls.span = record_function
+ Calls.span = record_function
a-trace-that-cannot-be-written-ends-the-run | train/test_profiling::test_a_trace
- except (OSError, RuntimeError) as error:
+ except KeyError as error:
the-step-before-is-in-the-profile | train/test_profiling::test_a_profile_has_the_steps
- if not self.first <= step <= self.last:
+ if not self.first <= step + 1 <= self.last:
@ tools/plan/timing.py | tools/plan/test_score
the-host-is-never-waited-for
- max(overhead, floor - kernels)
+ overhead
every-axis-has-the-network-of-tensor-parallelism
- if axis == "tensor" and share is not None
+ if share is not None
a-graph-waits-for-the-host | tools/plan/test_timing::test_the_host
- floor * (not step.is_replayed)
+ floor
weights-return-beside-the-update-in-stage-3 | tools/plan/test_timing::test_an_optimizer
- return update + returned if step.stage == 3 else max(update, returned)
+ return max(update, returned)
a-measured-layer-has-no-backward | tools/plan/test_score tools/plan/test_measured
- backward = step.layers * measured.backward + (1 - share) * edge
+ backward = (1 - share) * edge
every-stage-has-the-measured-edge | tools/plan/test_measured
- if not step.has_head:
+ if False:
a-waiting-rank-keeps-its-core | tools/plan/test_measured
- max(busy, hardware.concurrent_devices)
+ hardware.concurrent_devices
sums-hide-behind-a-cpu's-backward | tools/plan/test_measured
- busy if hardware.is_cpu else max(0.0, end - window)
+ max(0.0, end - window)
a-scattered-sum-is-timed-as-a-gather | tools/plan/test_measured
- (share * backward, call, "reduce_scatter")
+ (share * backward, call, "all_gather")
@ tools/plan/trace.py | tools/plan/test_timing::test_an_optimizer
offloaded-moments-stay
- "moments": self.moments * state,
+ "moments": self.moments * part,
offloaded-weights-return-once
- layers = [sum(bucket.own for bucket in each) for each in self.model.layers]
+ layers = [0]
@ tools/plan/hardware.py | tools/plan/test_score
stages-of-one-server-are-in-two
- if self.span is not None and self.span <= hardware.devices_per_server:
+ if self.span == 0:
a-gather-takes-as-long-as-an-all-reduce
- return passes / 2 * interpolated(table, size)
+ return interpolated(table, size)
a-measured-table-is-for-any-ranks
- found: Table = tables.get(key, ())
+ found: Table = next(iter(tables.values()), ())
a-layer-is-measured-for-any-number-of-processes | tools/plan/test_measured
- if self.is_cpu and step.ranks % self.devices_per_server:
+ if not step.ranks:
@ tools/plan/software.py | tools/plan/test_score
every-stage-has-the-embedding
- if self.rank == 0 or self.has_head:
+ if self.rank >= 0:
zero-3-does-not-reduce
- return "forward", 3 * self.micro_batches * calls
+ return "forward", 2 * self.micro_batches * calls
@ tools/layouts/work.py | tools/plan/test_score::test_published
heads-are-copied
- heads = q.new_empty(*q.transpose(-3, -2).shape[:-1], v.shape[-1]).transpose(-3, -2)
+ heads = q.new_empty(*q.shape[:-1], v.shape[-1])
@ tools/plan/score.py | tools/plan/test_score
anchors-count
- if not each["is_anchor"]]
+ if each]
ties-count-as-pairs
- if max(a, b) > (1 + NEAR) * min(a, b):
+ if a != b:
@ tools/plan/fastest.py | tools/plan/test_search
a-search-stops-too-early
- while queue and SAFE * queue[0].seconds <= self._slowest_of_best:
+ while queue and 2 * queue[0].seconds <= self._slowest_of_best:
ranks-keep-what-all-stages-keep
- kept *= min(number, stages) * (layers // stages)
+ kept *= 4 * number * layers
a-neighbour-loses-by-any-part
- part = max(losses, key=lambda each: losses[each])
+ part = min(losses, key=lambda each: losses[each])
@ tools/plan/quick.py | tools/plan/test_search
stages-of-unlike-depth-are-alike
- kind = rank if is_end else tuple(map(len, plan.layers[rank :: plan.ranks]))
+ kind = is_end
a-large-ring-is-larger-by-two
- return _plus(four, _plus(four, two, -1), ranks // 2 - 2)
+ return _plus(four, _plus(four, two, -1), ranks // 2 - 1)
@ tools/plan/buckets.py | tools/plan/test_search
planned-buckets-are-not-padded
- size = _round_up(size, ALIGNMENT * prod(axis.size for axis in over))
+ size = _round_up(size, ALIGNMENT)
sums-of-the-previous-micro-batch-are-over | tools/plan/test_derived::test_a_step_with_zero
- reducing = deque(buckets[-IN_FLIGHT:] * is_repeated)
+ reducing = deque[PlannedBucket]()
a-bias-comes-before-its-weight | tools/plan/test_derived::test_a_step_with_zero
- yield from reversed([*group])
+ yield from group
@ tools/plan/search.py | tools/plan/test_search
flags-leave-settings-out-that-are-none
- same.get(name) if value is None else value
+ value
@ tools/plan/interruptions.py | tools/plan/test_interruptions
a-save-counts-before-it-is-written
- exp(-(interval + times.save) / mtbf) / lost
+ exp(-(interval + stall) / mtbf) / lost
saves-do-not-wait-for-each-other
- if period := max(interval + stall, times.save):
+ if period := interval + stall:
restarts-are-not-interrupted
- exp(-times.restart / mtbf), times.stall
+ (1 - times.restart / mtbf), times.stall
mtbf-the-same-at-any-size
- self.mtbf * self.gpus / gpus
+ self.mtbf
starts-from-scratch-are-restarts
- [line for line in starts if line["step"] > 1] or starts
+ starts
@ megatron/train/executor.py | matrix[pipeline=2-gpt2-accumulate-whole-logits]
mean-of-the-means-of-micro-batches
- sums = self.objective.loss(x, batch, self.loss_scales)
+ sums = self.objective.loss(x, batch, self.loss_scales) / len(self.batches)
stage-computed-twice
- x: Any = inputs[0] if len(inputs) == 1 else inputs
-         if stage == 0:
+ x: Any = inputs[0] if len(inputs) == 1 else inputs
+         if stage and self.pipeline.stages > 1:
+             self.model.layers(x, batch, numbers=self.pipeline.layers[stage])
+         if stage == 0:
message-of-the-micro-batch-before
- self.ready[direction, stage, number] = tuple(tensors)
+ tensors = tuple(tensors)
+         vars(self)["late"], tensors = tensors, vars(self).get("late", tensors)
+         self.ready[direction, stage, number] = tensors
@ megatron/parallel/schedules.py | matrix[pipeline=2-gpt2-accumulate-whole-logits]
all-layers-on-every-stage
-         if self.stages == 1:
-             return None
-         return tuple(chain
+         return None
+         return tuple(chain
@ megatron/data/images.py | data/test_images::test_changes
crops-move-along-the-diagonal
- own = np.stack([mix(bits + 1), mix(bits + 2)], axis=1)
+ own = np.stack([mix(bits + 1), mix(bits + 1)], axis=1)
random-images-of-no-seed
- np.random.default_rng((self.seed, number))
+ np.random.default_rng(number)
@ megatron/checkpoint/retention.py | checkpoint/test_save::test_damaged
a-step-saved-again-is-not-read-again
- key = (name, checksum)
+ key = (name, None)
@ megatron/checkpoint/memory.py | checkpoint/test_memory::test_a_host_without
a-partner-has-room-for-one
- needed, free = 2 * (by_host[memory._host] + partner), disk_usage(SHARED_MEMORY).free
+ needed, free = 2 * by_host[memory._host] + partner, disk_usage(SHARED_MEMORY).free
@ megatron/train/monitors.py | checkpoint/test_memory::test_a_step_in_memory
a-memory-save-has-the-loss-of-an-earlier-evaluation
- self.loss, self.is_on_disk = None, False
+ self.is_on_disk = False
@ megatron/train/watch.py | train/test_watch::test_waits
a-circle-through-a-save-stays
- for ignored in ((), ("control", "save")):
+ for ignored in ((), ("control",)):
@ megatron/train/watch.py | train/test_watch::test_four
more-ranks-counts-the-named
- return names + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
+ return names + (f" and {len(ranks)} more" if len(ranks) > 4 else "")
@ megatron/train/watch.py | train/test_watch::test_a_rank_that_left
a-leaver-that-did-its-part-is-blamed
- if other.left is not None and other.started.get(wait.axis, 0) < wait.number:
+ if other.left is not None and other.started.get(wait.axis, 0) <= wait.number:
@ megatron/train/evaluate.py | train/test_evaluate::test_the_mean
an-evaluation-leaves-a-model-in-training
- model.train(was_training)
+ model.train()
@ megatron/parallel/cross_entropy.py | parallel/test_cross_entropy::test_no_chunk
a-chunk-exceeds-its-bytes
- count = max(1, -(-tokens // max(1, most)))
+ count = max(1, tokens // max(1, most))
@ megatron/parallel/compare.py | parallel/test_buckets::test_parameters
the-last-rank-alone-tells-what-is-reached
- reached[name] = reached.get(name, False) or is_reached
+ reached[name] = is_reached
@ megatron/parallel/buckets.py | parallel/test_buckets::test_bf16
grads-in-half-precision-are-not-clipped
- if view.parameter.grad is not None and view.parameter.dtype != view.gradient.dtype:
+ if view.parameter.grad is not None and view.parameter.dtype == view.gradient.dtype:
@ megatron/huggingface/weights.py | models/test_hf_weights::test_random_weights_are_dist
modules-draw-the-same-numbers
- torch.manual_seed(derive_seed(seed, "initialise", name))
+ torch.manual_seed(derive_seed(seed, "initialise"))
@ megatron/inference/samples.py | inference/test_samples::test_samples_are
samples-ignore-the-seed
- self.sampling = Sampling(NEW_TOKENS, top_k=TOP_K, seed=config.training.seed)
+ self.sampling = Sampling(NEW_TOKENS, top_k=TOP_K)
@ megatron/config/parallel.py | config/test_checks::test_zero
context-ranks-share-nothing-out
- copies * self.context_parallel_size > 1
+ copies > 1
@ megatron/config/pretrain.py | config/test_checks::test_the_fewest
the-cure-is-no-least-multiple
- multiple = ranks // math.gcd(ranks, tokens)
+ multiple = ranks
@ tasks/readers/inputs.py | tasks/test_inputs::test_length
the-share-that-works-is-rounded-down
- {np.ceil(100 * share) / 100:.2f}
+ {np.round(100 * share) / 100:.2f}
@ tasks/record.py | tasks/test_main::test_a_folder
a-renamed-file-is-the-same-folder
- lines = "".join(f"{sha256(each)}  {each.relative_to(path).as_posix()}\n" for each in files)
+ lines = "".join(f"{sha256(each)}\n" for each in files)
@ tools/corpus/dedup/clusters.py | tools/corpus/test_dedup::test_an_absurd
another-limit-is-the-same-task
- return f"{self.parts} parts by {self.priority} up to {self.max_cluster}"
+ return f"{self.parts} parts by {self.priority}"
@ tools/corpus/split.py | tools/corpus/test_split::test_the_shuffle
every-seed-gives-one-order
- (files.keyed_hash(f"order {settings.seed}", identity) >> 65)
+ (files.keyed_hash("order", identity) >> 65)
@ tools/corpus/urls.py | tools/corpus/test_urls::test_the_first
a-compressed-list-is-as-long-as-its-file
- size += (unit.stop - unit.start) * (EXPANSION if packed else 1)
+ size += unit.stop - unit.start
@ tools/corpus/tokenize/writer.py | tools/corpus/tokenize/test_writer::test_a_tokenizer
a-tokenizer-is-not-flushed
- stream.write(content)
-             flush_to_disk(stream)
+ stream.write(content)
the-highest-id-of-the-last-shard | tools/corpus/tokenize/test_writer::test_verify_reports
- max(highest, highest_of_shard)
+ highest_of_shard
@ tools/convert/legacy/megatron_2019.py | tools/convert/legacy/test_megatron_2019::test_settings
an-old-gelu-is-exact
- if first.args.get("bias_gelu_fusion", True) is False and not first.args.get("openai_gelu"):
+ if first.args.get("bias_gelu_fusion", True) is False:
a-later-version-on-the-second-rank | tools/convert/legacy/test_megatron_2019::test_refusals
- rank.version != first.version
+ rank.version < first.version
@ tools/plan/hardware.py | tools/plan/test_plan::test_hardware
a-size-twice-is-a-table
- if not table or sizes != sorted({*sizes}) or
+ if not table or sizes != sorted(sizes) or
@ tools/plan/timing.py | tools/plan/test_timing::test_the_last
the-last-layer-hides-a-gather
- window = forward * (depth - 1) / depth  # the last layer has no gather beside it
+ window = forward
@ conformance/compare.py | conformance/test_run::test_agreement
a-loss-that-moves-little-is-alive
- "the loss's largest move": (max(moves, default=0), max(facts["loss_moves"])),
+ "the loss's largest move": (max(moves, default=0), min(facts["loss_moves"])),
@ conformance/peers.py | conformance/test_peers::test_models
a-row-shows-its-best-model
- cells.append("undefined" if None in sizes else f"{max(sizes):.0e}")
+ cells.append("undefined" if None in sizes else f"{min(sizes):.0e}")
@ megatron/train/metrics.py | train/test_metrics::test_loggers_get_the_exit_code
an-end-is-said-twice
- if code not in (0, self.exit_code):
+ if code != 0:
@ megatron/train/profiling.py | train/test_profiling::test_a_profile_without
a-run-beyond-its-profile-says-nothing
- if self.training.state.step >= self.last or
+ if self.training.state.step > self.last or
@ megatron/train/trained.py | checkpoint/test_layouts::test_a_switch
the-first-switch-of-zero-is-none
- saved_stage = max(saved_stage, parallel.get("zero_stage", 0))
+ saved_stage = parallel.get("zero_stage", 0)
@ megatron/config/presets.py | config/test_parse::test_a_missing_preset
presets-of-another-program-are-near
- folder = folder or file.parent
+ folder = file.parent
@ megatron/config/parts.py | config/test_parts::test_modules_of_a_folder
a-module-of-a-folder-hides-others
- sys.path.append(folder)
+ sys.path.insert(0, folder)
@ tools/report/runs.py | tools/test_compare_runs::test_a_resumed_run
a-resumed-run-changed-its-place
- if name not in PLACES
+ if name != "command"
@ tools/corpus/clean.py | tools/corpus/test_clean::test_long_english
lengths-are-sorted-as-texts
- keys.sort(key=lambda key: (len(key), key))
+ keys.sort()
lengths-before-for-those-after
- after:{octave(text)}
+ after:{octave(before)}
repairs-count-as-newlines-removed
- += mended != text
+ += mended != before
@ tools/corpus/decontaminate.py | tools/corpus/test_decontaminate::test_a_cut_takes
cuts-that-touch-are-two
- apart = starts[1:] > stops[:-1]
+ apart = starts[1:] >= stops[:-1]
blank-pieces-stay | tools/corpus/test_decontaminate::test_short_pieces
- if piece and not piece.isspace()]
+ if piece]
a-short-piece-counts-as-the-whole-text | tools/corpus/test_decontaminate::test_short_pieces
- {**record, "text": piece}, reason)
+ record, reason)
characters-cut-of-the-last-document
- counters["characters cut"] +=
+ counters["characters cut"] =
@ tools/corpus/split.py | tools/corpus/test_split::test_a_compressed
a-run-fills-the-memory
- if 2 * size > settings.memory_bytes:
+ if size > settings.memory_bytes:
@ megatron/config/launch.py | config/test_parse::test_a_second_ctrl_c
a-second-sigterm-ends-a-save
- self.received == name == "SIGINT":
+ self.received == name:
@ megatron/train/metrics.py | train/test_metrics::test_an_end_without
a-slow-logger-loses-its-end
- closing.join(None if error is None else GRACE)
+ closing.join(GRACE)
@ megatron/train/evaluate.py | train/test_evaluate::test_a_validation
a-measure-is-not-said
- for name in terms if is_all or name not in state.objective.terms}
+ for name in terms if is_all}
@ megatron/train/inputs.py | train/test_inputs::test_a_checkpoints
a-checkpoints-tokenizer-goes-with-any-data
- if of_checkpoint is not None and of_checkpoint.fingerprint == corpus.fingerprint:
+ if of_checkpoint is not None:
@ megatron/checkpoint/resume.py | checkpoint/test_resume::test_a_fingerprint
a-fingerprint-of-data-lacks-the-vocabulary
- identity = {key: facts[key] for key in ("vocab_size", "tokenizer", "data")}
+ identity = {key: facts[key] for key in ("tokenizer", "data")}
@ megatron/checkpoint/retention.py | checkpoint/test_save::test_a_failed_claim
folders-of-another-run-go
- missing.clear()  # they are the other run's
+ pass
@ tasks/score.py | tasks/test_finetune::test_any_layout
scores-leave-a-model-in-training
- model.train(was_training)
+ model.train()
@ tools/doctor/machine.py | tools/test_doctor::test_a_speed
a-speed-of-one-product
- rate = count * 2 * size**3 / spent
+ rate = 2 * size**3 / spent
@ conformance/compare.py | conformance/test_run::test_a_fault_of_more
a-fault-of-fewer-ranks-is-named
- if ranks % number == 0:
+ if number <= ranks:
@ megatron/config/parts.py | config/test_parts::test_a_layer_that
a-layer-is-given-twice
- if name in custom:
+ if name in settings:
@ megatron/inference/samples.py | inference/test_samples::test_samples_are
the-last-samples-come-twice
- if end not in SIGNALS and self.training.state.step > self.last:
+ if end not in SIGNALS and self.training.state.step >= self.last:
@ tasks/readers/squad_data.py | tasks/test_squad::test_best_contexts
a-longer-window-has-no-bonus
- PER_TOKEN = 0.01
+ PER_TOKEN = 0.0
@ tools/corpus/decontaminate.py | tools/corpus/test_decontaminate::test_evaluation_articles
blanks-hide-a-title
- title = record["text"].lstrip().partition("\n")[0]
+ title = record["text"].partition("\n")[0]
@ tools/plan/search.py | tools/plan/test_search::test_one_tensor
one-rank-cuts-the-sequence
- cut = config.parallel.sequence_parallel and own[0] > 1
+ cut = config.parallel.sequence_parallel
@ tasks/finetune.py | tasks/test_finetune::test_optimizer
the-last-step-of-a-seed-has-no-rate
- lr_decay_iters=steps + 1,
+ lr_decay_iters=steps,
@ megatron/train/state.py | train/test_pipelining::test_a_tied_embedding_counts
a-tied-embedding-counts-twice
- for spec in sharding_specs(self.model).values() if spec.is_owner()]
+ for spec in sharding_specs(self.model).values()]
@ tasks/language_model.py | tools/test_lm_harness::test_a_begin_mark
a-text-begins-without-its-mark
- begin = [] if add_special_tokens is False else self._begin
+ begin = self._begin if add_special_tokens else []
a-whole-text-begins-with-an-end-mark
- return (self._begin or [self._tokenizer.eod])[0]
+ return self._tokenizer.eod
@ tasks/lambada.py | tasks/test_lambada::test_word_boundary
a-passage-that-fits-is-cut
- sum(len(each.tokens) > self.positions + 1 for
+ sum(len(each.tokens) > self.positions for
@ tasks/cifar10.py | tasks/test_main::test_pictures
pictures-of-the-first-images
- chosen = numbers[np.linspace(0, len(numbers) - 1, min(2 * DRAWN, len(numbers)), dtype=int)]
+ chosen = numbers[: 2 * DRAWN]
precision-of-each-class
- right[labels == label]
+ right[best[:, 0] == label]
@ tasks/finetune.py | tasks/test_finetune::test_of_equal_epochs
the-last-of-equal-epochs-is-the-best
- return max(range(len(values)), key
+ return max(reversed(range(len(values))), key
@ tasks/finetune.py | tasks/test_finetune::test_record_of_training
a-fine-tuned-model-of-no-run
- "weights_of": manifest.get("run"),
+ "weights_of": None,
@ tasks/readers/inputs.py | tasks/test_race::test_cut_options
a-cure-still-cuts-the-longest
- left = int((lengths > better).sum())
+ left = int((lengths >= better).sum())
@ tasks/readers/race.py | tasks/test_race::test_long_passages
a-quarter-rounded-down
- return self.max_qa_length or -(-self.seq_length // 4)
+ return self.max_qa_length or self.seq_length // 4
lengths-with-another-passage | tasks/test_race::test_levels
- np.repeat(passages, OPTIONS)
+ np.tile(passages, OPTIONS)
@ tasks/wikitext103.py | tasks/test_wikitext103::test_window
a-window-as-in-training-is-warned-of
-     if length > trained:
+     if length >= trained:
@ tasks/paper.py | tasks/test_paper::test_table_5
nearest-in-parameters-not-in-ratio
- abs(log(PARAMETERS[name] / parameters))
+ abs(PARAMETERS[name] - parameters)
@ tasks/record.py | tasks/test_main::test_a_folder
a-file-that-moved-inside-its-folder
- {each.relative_to(path).as_posix()}\n
+ {each.name}\n
@ tools/corpus/engine.py | tools/corpus/test_engine::test_a_second_run
a-share-removes-what-others-write
-                 if settings.shard is None:
-                     remove(self.output.rglob(PARTIAL))
+                 if True:
+                     remove(self.output.rglob(PARTIAL))
@ tools/corpus/harvest.py | tools/corpus/test_harvest::test_modules
four-words-are-no-prose
- len(words) >= 4
+ len(words) > 4
max-bytes-of-characters | tools/corpus/test_harvest::test_harvest
- size = len(record["text"].encode())
+ size = len(record["text"])
@ tools/corpus/files.py | tools/corpus/test_files::test_other_fields
a-large-number-escapes-all-letters
- json.dumps(record, ensure_ascii=False, separators
+ json.dumps(record, separators
@ tools/corpus/split.py | tools/corpus/test_split::test_nothing_is_lost
evenness-of-the-smallest-shard
- evenness[side] = round(max(sizes)
+ evenness[side] = round(min(sizes)
@ tools/corpus/tokenize/writer.py | tools/corpus/tokenize/test_writer::test_a_tokenizer_is_on_disk
names-of-a-data-set-are-not-flushed
-     flush_path(with_suffix(prefix, ".json").parent)
+     pass
@ tools/corpus/tokenize/encode.py | tools/corpus/tokenize/test_step::test_a_sample
a-sample-of-the-first-units
- some = units[:: -(-len(units) // SAMPLE_UNITS)]
+ some = units[:SAMPLE_UNITS]
@ tools/corpus/tokenize/encoders.py | tools/corpus/tokenize/test_encoders::test_only_so_many
words-are-cached-without-end
-         self._cached += sum(map(len, new))
+         pass
@ tools/corpus/dedup/verify.py | tools/corpus/test_dedup::test_sets_are_read_again
memory-once-full-stays-full
-                 self._bytes = 0
-             found
+             found
@ tools/corpus/dedup/clusters.py | tools/corpus/test_dedup::test_of_equal_edges
of-equal-edges-the-last-by-rank
- as_good = (similarity == best[here]) & (found.ranks[there] < found.ranks[via[here]])
+ as_good = (similarity == best[here]) & (found.ranks[there] > found.ranks[via[here]])
@ tools/chaos/account.py | tools/chaos/test_account::test_spans
a-save-of-a-stopped-rank-is-a-save
- if span.kind in ("steps", "evaluation", "save"):
+ if span.kind in ("steps", "evaluation"):
@ tools/plan/score.py | tools/plan/test_score::test_an_anchor_makes
an-anchor-is-an-error
- errors = [abs(each["error"]) for _, each in counted]
+ errors = [abs(each["error"]) for each in found]
@ tools/plan/fastest.py | tools/plan/test_search::test_a_layout_that_fits
layouts-that-nearly-fill-memory-are-left-out
- if step.lacks(self.hardware.limit / SAFE_MEMORY) > 0:
+ if step.lacks(self.hardware.limit * SAFE_MEMORY) > 0:
@ tools/report/curves.py | tools/report/test_plot::test_smoothing
a-wider-mean-of-a-curve
- most = np.arange(len(values)), len(values) // 25
+ most = np.arange(len(values)), len(values) // 20
@ tools/report/corpus.py | tools/corpus/test_report::test_a_source
a-source-counts-before-it-is-made
- for source in step.counts.input.keys() - written:
+ for source in step.counts.input.keys():
@ tools/convert/legacy/dcp_tutorial.py | tools/convert/legacy/test_dcp::test_import_refusals
moments-may-be-no-numbers
- if not whole.isfinite().all():
+ if kind == "weight" and not whole.isfinite().all():
@ tools/corpus/repair.py | tools/corpus/test_clean::test_newlines
a-text-of-120-characters-a-line-stays
- WIDTHS = range(40, 121)
+ WIDTHS = range(40, 120)
four-full-lines-of-five-stay
- full >= SHARE_FULL * len(inner)
+ full > SHARE_FULL * len(inner)
a-word-that-just-fits-does-not | tools/corpus/test_clean::test_newlines_that
- split(None, 1)[0]) > width
+ split(None, 1)[0]) >= width
@ tools/doctor/links.py | tools/test_doctor::test_a_collective
a-collective-as-fast-as-its-fastest-rank
- slowest = max(each for _, each in everyone)
+ slowest = min(each for _, each in everyone)
@ tools/experiments/runner.py | tools/experiments/test_runner::test_micro_batches
micro-batches-that-do-not-divide-a-share
- gcd(config.training.micro_batch_size, batch // data)
+ min(config.training.micro_batch_size, batch // data)
@ tools/layouts/activations.py | tools/test_compare_runs::test_what_is_almost
rounding-of-nothing-is-infinite
- relative(value, kept[key], SEEN * largest[key[0]])
+ relative(value, kept[key])
@ tools/layouts/compare.py | tools/layouts/test_compare::test_a_batch
a-batch-that-one-layout-divides
- copies = lcm(*(layout.size("data") for layout in layouts))
+ copies = max(layout.size("data") for layout in layouts)
@ benchmarks/harness.py | benchmarks/test_harness::test_records
no-turns-are-accepted
- for name in ("rounds", "turns"):
+ for name in ("rounds",):
@ benchmarks/report.py | benchmarks/test_harness::test_cells
intervals-of-90-percent
- <= 0.025 * 2**n]
+ <= 0.05 * 2**n]
@ benchmarks/report.py | benchmarks/test_harness::test_records
another-gpu-is-the-same-machine
- for name in ("processor", "cores", "gpu"))
+ for name in ("processor", "cores"))
@ benchmarks/processes.py | benchmarks/test_harness::test_memory
cpu-seconds-of-the-busiest-rank
- "cpu": sum(cpu)}
+ "cpu": max(cpu)}
@ benchmarks/peers.py | benchmarks/test_questions::test_the_norm
no-norm-on-the-first-rank
- if not self.rank.rank or self.is_cut(parameter)]
+ if self.rank.rank or self.is_cut(parameter)]
@ benchmarks/useful_time.py | benchmarks/test_questions::test_other_weights
other-weights-count-as-equal
- 100 * bool(weights and weights["equal"])
+ 100 * bool(weights)
@ benchmarks/steps.py | benchmarks/test_questions::test_ranks_read
ranks-read-what-others-read-next
- (number * ranks + rank) * size
+ (number + rank) * size
a-step-begins-within-the-one-before
- size * ranks * count
+ size * ranks
@ conformance/compare.py | conformance/test_run::test_a_difference
the-largest-difference-not-the-worst
- each.size / each.limit > known.size / known.limit
+ each.size > known.size
@ conformance/compare.py | conformance/test_run::test_a_layout_that_is_ignored
the-largest-of-prime-factors
- 0.95 * min(map(least_factor, sizes))
+ 0.95 * max(map(least_factor, sizes))
@ conformance/run.py | conformance/test_run::test_the_status
a-failure-hides-a-difference
- for each in (1, 2, 3) if each in found
+ for each in (2, 1, 3) if each in found
@ examples/own_dataset.py | examples/test_examples::test_another_seed
every-seed-gives-the-same-samples
- default_rng([self.seed, n])
+ default_rng(n)
@ megatron/data/bert.py | data/test_bert::test_random_pairs
random-pairs-are-of-unequal-segments
- np.arange(self.length) >= self.length // 2
+ np.arange(self.length) > self.length // 2
@ megatron/data/images.py | data/test_images::test_a_folder_is_refused
a-label-is-one-beyond-the-classes
- if each.label >= len(classes):
+ if each.label > len(classes):
@ megatron/checkpoint/memory.py | checkpoint/test_memory::test_going_back
going-back-by-a-link-uses-memory
- one.resolve().parent != save.resolve()
+ one.parent != save
@ megatron/config/checks.py | config/test_checks::test_what_works
the-smaller-of-two-divisors-works
- key=lambda n: (abs(n - value), -n)
+ key=lambda n: (abs(n - value), n)
@ megatron/config/parallel.py | config/test_checks::test_what_works
a-shorter-sequence-is-said-to-work
- works = math.ceil(seq_length / pieces) * pieces
+ works = seq_length // pieces * pieces
@ megatron/config/presets.py | config/test_parse::test_a_kind_that
the-kind-of-a-preset-has-the-first-line
- .get(("model", "kind"), 1)
+ .get(("", "kind"), 1)
the-first-kind-of-presets-counts
- and "kind" in model:
+ and "kind" in model and not found:
@ megatron/train/diagnose.py | train/test_diagnose::test_samples_are
readers-of-other-samples-are-counted-twice
- data_size=mesh.batch.size // readers,
+ data_size=mesh.batch.size,
@ megatron/train/launch.py | train/test_launch::test_torch_waits
torch-ends-a-run-before-the-watch
- timedelta(seconds=ROUNDS * limit + _MARGIN)
+ timedelta(seconds=limit + _MARGIN)
@ megatron/train/loop.py | train/test_callbacks::test_numbers_that_come
elapsed-seconds-lack-evaluations
- "elapsed_seconds": about.clock.elapsed,
+ "elapsed_seconds": about.clock.training,
@ megatron/train/monitors.py | train/test_utilization::test_the_time_left
the-first-step-counts-in-the-time-left
- (elapsed - start) / (step - first) if step > first
+ (elapsed - start) / step if step > first
@ megatron/train/monitors.py | checkpoint/test_memory::test_a_step_in_memory
a-step-that-is-being-written-is-not-kept
- self.is_on_disk = not self.config.checkpoint.async_save
+ self.is_on_disk = True
@ megatron/train/trained.py | checkpoint/test_layouts::test_a_switch
every-other-stage-of-zero-is-a-warning
- if (saved_stage > 1) != (zero_stage > 1):
+ if saved_stage != zero_stage:
@ megatron/parallel/zero3.py | parallel/test_zero::test_layers_that_ranks
a-rank-may-call-fewer-layers
- pairs = zip_longest(first, other)
+ pairs = zip(first, other)
@ megatron/parallel/offload.py | parallel/test_offload::test_an_activation
buffers-go-to-the-host
- weights = [*module.parameters(), *module.buffers()]
+ weights = [*module.parameters()]
@ megatron/parallel/schedules.py | parallel/test_schedules::test_lists_that
a-micro-batch-before-the-first-is-none
- if not is_here or action.micro_batch < 0 or
+ if not is_here or
@ megatron/parallel/initialize.py | parallel/test_zero::test_masters_begin
masters-of-zero-3-begin-unrounded
- whole.to(dtypes[name]), slices[name].spec)
+ whole, slices[name].spec)
@ megatron/parallel/sharding.py | parallel/test_sharding::test_rows_of
torchs-own-layers-see-all-rows
- mesh.tensor_parallel_mode != "1d" or mesh.stream.size > 1:
+ mesh.tensor_parallel_mode != "1d":
@ megatron/parallel/stages.py | parallel/test_stages::test_inputs_of
inputs-of-a-stage-have-the-dtype-of-other-batches
- (name, each.shape, each.dtype) for name
+ (name, each.shape) for name
the-tenth-stage-comes-before-the-ninth | parallel/test_stages::test_the_copies
- sorted(members, key=lambda each: int(each.partition(".")[0]))
+ sorted(members)
@ megatron/data/batch.py | parallel/test_context::test_each_rank
tokens-that-are-taken-twice-have-other-places
- {"token_order": order if self.token_order is None else self.token_order[order]}
+ {"token_order": order}
@ megatron/data/bert.py | data/test_bert::test_short
a-run-of-sentences-that-just-fits-is-too-long
- block[start] + target, "right")
+ block[start] + target)
a-random-id-may-be-a-mask | data/test_bert::test_loss_mask
- marks = [tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask]
+ marks = [tokenizer.pad, tokenizer.cls, tokenizer.sep]
@ megatron/data/images.py | data/test_images::test_a_changed
labels-are-no-part-of-the-content
- digest.update(labels.tobytes())
+ pass
colors-without-deviation-are-divided-by-0 | data/test_images::test_images_of_one
- sqrt(max(each, 0)) / 255 or 1.0
+ sqrt(max(each, 0)) / 255
@ megatron/data/sources.py | data/test_sources::test_unshuffled
sentences-in-order-are-a-warning
- if not about.shuffled and about.sentences is None:
+ if not about.shuffled:
@ megatron/data/text_checks.py | tasks/test_inputs::test_length
a-share-below-that-of-unknown-tokens-is-said-to-work
- math.ceil(100 * share)
+ round(100 * share)
@ megatron/data/tokenizer.py | data/test_tokenizer::test_ids
a-gap-between-ids-shrinks-the-vocabulary
- max(vocabulary.values(), default=-1) + 1
+ len(vocabulary)
the-end-mark-alone-is-special | data/test_tokenizer::test_mark_that
- token["special"] or token["content"] == end
+ token["content"] == end
@ megatron/checkpoint/load.py | checkpoint/test_faults::test_the_folders
each-rank-looks-at-its-own-folders
- folders = mesh.control.gather(list(folders))[0]
+ folders = list(folders)
weights-of-other-stages-are-of-no-use | checkpoint/test_layouts::test_each_stage
- more = names - _of_all_stages(expected.values(), mesh)
+ more = names - expected.keys()
@ megatron/checkpoint/resume.py | checkpoint/test_resume::test_default
an-optimizer-older-than-its-setting-is-any
- config.resume != "free" or rules.get(flag(each.name)) == "state"
+ config.resume != "free"
a-key-that-this-run-lacks-does-not-differ | checkpoint/test_resume::test_a_key
- for name in ours.keys() | theirs.keys():
+ for name in [*theirs.keys()]:
@ megatron/config/launch.py | config/test_parse::test_a_signal_goes
a-signal-after-another-reason-is-lost
- if is_first or (reason in SIGNALS and self.received not in SIGNALS):
+ if is_first:
@ megatron/huggingface/replacements.py | models/test_unmodified::test_dropout_of
dropout-of-more-rows-than-keys
- keys is None or len(keys) == x.shape[:-1].numel()
+ True
@ megatron/models/build.py | models/test_kinds::test_a_parameter
a-name-that-begins-like-a-module-is-of-it
- name.startswith(f"{module}.")
+ name.startswith(module)
@ megatron/models/gpt.py | tasks/test_finetune::test_dropout_differs
options-of-neighbours-drop-the-same
- batch.numbers[:, None] * several + torch
+ batch.numbers[:, None] + torch
@ megatron/models/hf_folder.py | models/test_hf_weights::test_files
the-last-of-two-files-has-the-tensor
- if key in files:
+ if False:
@ megatron/train/diagnose.py | train/test_diagnose::test_an_earlier
the-first-that-ran-is-named
- finding if local is None else min(finding, local)
+ local or finding
@ megatron/train/state.py | train/test_trained::test_pure
narrow-moments-are-loaded-as-wide-ones
- (saved_dtype.itemsize < 4) != (dtype.itemsize < 4)
+ False
@ megatron/train/watch.py | train/test_watch::test_a_phase
a-phase-that-comes-again-begins-anew
- Progress.seconds.get(last, 0.0) + now - began
+ now - began
@ megatron/parallel/initialize.py | parallel/test_sharding::test_kernels
stages-of-a-rank-draw-the-same
- micro_batch, *where, *stage)
+ micro_batch, *where)
@ tools/corpus/engine.py | tools/corpus/test_engine::test_a_second_run
peak-memory-in-kilobytes
- .ru_maxrss * 1024,
+ .ru_maxrss,
@ tools/corpus/engine.py | tools/corpus/test_engine::test_what_is_not_whole
unfinished-files-below-the-output-stay
- if path.is_file())
-         remove(self.output.rglob(PARTIAL))
+ if path.is_file())
+         remove(self.output.glob(PARTIAL))
@ tools/corpus/tokenize/writer.py | tools/corpus/tokenize/test_writer::test_verify_finds_documents
documents-of-two-chunks-are-not-compared
- shard.documents[start : start + CHUNK + 1])
+ shard.documents[start : start + CHUNK])
@ tools/corpus/tokenize/step.py | tools/corpus/tokenize/test_step::test_a_share
a-sample-is-judged-as-the-whole
- if count > MARGIN * settings.max_unknown
+ if count > settings.max_unknown
damaged-files-are-not-set-aside | tools/corpus/tokenize/test_step::test_text_files
- _dropped(counts, BAD_LINE) + _dropped(counts, DAMAGED_FILE)
+ _dropped(counts, BAD_LINE)
@ tools/corpus/dedup/clusters.py | tools/corpus/test_dedup::test_a_cluster_of
a-cluster-of-the-largest-size-stays
- sizes.max(initial=0) <= task.max_cluster:
+ sizes.max(initial=0) < task.max_cluster:
@ tools/chaos/weights.py | tools/chaos/test_account::test_weights
a-flipped-sign-of-zero-beside-others-is-equal
- beyond = beyond if tolerance else differences
+ beyond = dict(beyond)
@ tools/plan/hardware.py | tools/plan/test_timing::test_a_ring_goes
a-link-slows-ranks-of-different-servers
- return network if inside == 1 else min(link, network)
+ return min(link, network)
@ tools/plan/layouts.py | tools/plan/test_search::test_a_layer_for
no-stage-of-a-single-layer
- sorted(powers | {most})
+ sorted(powers)
@ tools/report/runs.py | tools/test_compare_runs::test_a_gap
a-gap-to-zero-is-infinite
- if a and b is not None else inf
+ if a and b else inf
@ tools/layouts/activations.py | tools/test_compare_runs::test_a_module_that_works
what-a-module-overwrites-is-compared
- kept[key] = value.clone()
+ kept[key] = value
@ tools/layouts/work.py | tools/plan/test_timing::test_equal_numbers
numbers-of-other-types-are-the-same
- return type(value), value  #
+ return value  #
@ tools/convert/compare.py | tools/convert/test_compare::test_logits
logits-that-are-no-numbers-are-equal
- if not all(head.difference <= TOLERANCE * head.largest for
+ if any(head.difference > TOLERANCE * head.largest for
@ tools/convert/legacy/dcp_folder.py | tools/convert/legacy/test_dcp::test_import_refusals
a-chunk-of-another-dtype-is-cast
- if (part.dtype, part.shape) != (self.dtype, chunk.shape):
+ if part.shape != chunk.shape:
a-short-file-is-found-late
- st_size < chunk.start + chunk.nbytes
+ st_size < chunk.nbytes
@ tools/doctor/machine.py | tools/test_doctor::test_cores
a-full-machine-is-idle
- processes * threads < available
+ processes * threads <= available
@ tools/experiments/learning_curves.py | tools/experiments/test_reports::test_learning_curves
a-lost-step-is-no-gap
- != "train_iters" or steps[-1]["step"] != len(steps):
+ != "train_iters":
@ tools/convert/legacy/megatron_2019.py | tools/convert/legacy/test_megatron_2019::test_refusals
ranks-may-differ-in-dropout
- for name in (*FLAGS, *TRAINING):
-             if
+ for name in FLAGS:
+             if
@ conformance/compare.py | conformance/test_run::test_agreement
one-live-step-is-enough
- (min(found.grad_norms, default=0),
+ (max(found.grad_norms, default=0),
@ conformance/worker.py | conformance/test_run::test_memory
equal-halves-of-a-buffer-count-once
- storage.data_ptr(), local.storage_offset(), number
+ storage.data_ptr(), number
@ conformance/run.py | conformance/test_run::test_a_fault_of_more
faults-of-the-first-layout-alone
- number = max(ranks(options.layout), ranks(options.resume_layout or {}))
+ number = ranks(options.layout)
@ benchmarks/processes.py | benchmarks/test_harness::test_a_turn
seconds-of-the-quickest-rank
- {"wall": max(wall),
+ {"wall": min(wall),
@ benchmarks/scaling.py | benchmarks/test_scaling::test_ranks_that_share
ranks-that-share-a-core-take-no-longer
- max(1, ranks / cores)
+ max(1, cores / ranks)
@ benchmarks/useful_time.py | benchmarks/test_questions::test_other_weights_or
other-weights-are-wrong-with-an-unnamed-cause-alone
- < 100 or figures.get("unnamed"):
+ < 100 and figures.get("unnamed"):
@ benchmarks/commits.py | benchmarks/test_questions::test_cpu_seconds
cpu-seconds-since-the-start
- "cpu": spent - before,
+ "cpu": spent,
@ benchmarks/zero.py | benchmarks/test_questions::test_memory_of
memory-of-a-rank-is-that-of-all
- unit=RANKS * 2**20),
+ unit=2**20),
@ benchmarks/profiles.py | benchmarks/test_profiles::test_an_operator
an-operator-that-begins-with-its-caller-holds-it
- float(each["ts"]), -float(each["dur"])))
+ float(each["ts"])))
@ megatron/config/parse.py | config/test_parse::test_another_rank
notes-of-an-error-are-not-printed
- notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
+ notes = ""
@ megatron/config/presets.py | config/test_parse::test_a_missing
a-preset-with-its-kind-is-not-near
- set(chain(*inside)) - {"kind"} <= set(keys):
+ set(chain(*inside)) <= set(keys):
@ megatron/data/cache.py | data/test_documents::test_one_of
two-make-the-same-cache
- with suppress(OSError, DataError):  # made by another process in the meantime
-             return find()
-         return make()
+ return make()
a-cache-stays-open | data/test_documents::test_lines_are
- weakref.finalize(self, os.close, self._descriptor)
+ weakref.finalize(self, id, self._descriptor)
@ megatron/models/registry.py | config/test_parse::test_a_kind_that
a-preset-of-another-kind-is-near
- of_preset = None  # `parse`
+ raise  # `parse`
@ megatron/train/machine.py | train/test_machine::test_which
two-samples-at-once-are-the-fewest
- if training.micro_batch_size > 1:
+ if training.micro_batch_size > 2:
@ megatron/parallel/schedules.py | parallel/test_schedules::test_plans
a-custom-schedule-is-called-by-its-kind
- kind = self.kind if self.custom_schedule is None else "custom"
+ kind = self.kind
@ megatron/parallel/stages.py | parallel/test_stages::test_bad_input
virtual-stages-are-refused-without-their-name
- if count % virtual:
+ if False:
@ megatron/parallel/context.py | parallel/test_context::test_heads_that
heads-that-ranks-cannot-share-are-cut
- if heads % axis.size:
+ if heads < axis.size:
@ megatron/checkpoint/memory.py | checkpoint/test_memory::test_the_newest
a-damaged-step-on-disk-hides-the-same-one-in-memory
- steps[0] > step_of(on_disk[0])
+ steps[0] >= step_of(on_disk[0])
what-was-in-memory-is-not-flushed | checkpoint/test_memory::test_a_damaged_step
- flush_to_disk(stream)
+ pass
@ megatron/parallel/bucket.py | parallel/test_zero::test_a_model_of_ones_own
only-the-last-micro-batch-tells-what-is-reached
- view.is_reached |= view.is_filled
+ view.is_reached = view.is_filled
@ megatron/parallel/buckets.py | parallel/test_stages::test_halves
the-halves-of-one-stage-reduce-those-of-all
- if is_last and stage is None:
+ if is_last:
@ megatron/parallel/buckets.py | parallel/test_zero::test_a_gradient_that_ranks
a-gradient-that-ranks-have-in-common-counts-on-each
- is_owner = is_owner and (bucket.shared is self.shared or self.shared.rank == 0)
+ is_owner = is_owner and (bucket.shared is self.shared or True)
@ megatron/parallel/dropout.py | parallel/test_dropout::test_the_expectation
a-rate-of-dropout-is-rounded-down
- return min(round(p * STEPS), STEPS - 1)
+ return min(int(p * STEPS), STEPS - 1)
@ megatron/parallel/dropout.py | parallel/test_block_attention::test_in_bf16
gradients-of-keys-add-up-in-half
- (torch.zeros_like(each, dtype=wide) for each in (k, v))
+ (torch.zeros_like(each) for each in (k, v))
@ megatron/train/pipelining.py | parallel/test_stages::test_every_layout
denominators-of-context-ranks-stay-apart
- counts = all_reduce(counts, mesh.loss)
+ counts = all_reduce(counts, mesh.batch)
@ megatron/train/loop.py | train/test_loop::test_it_leaves_when_told
a-failed-save-does-not-end-the-run
- is_late or loop.signals.received is not None or has_failed
+ is_late or loop.signals.received is not None
@ megatron/models/gpt.py | models/test_finetuned::test_dropout_stands
sequences-of-a-sample-drop-as-other-samples-do
- numbers = batch.numbers[:, None] * several +
+ numbers = batch.numbers[:, None] +
@ megatron/parallel/offload.py | parallel/test_zero::test_masters_begin
weights-on-the-host-are-rounded-at-the-first-publish
- bucket.weight_dtype, self.device)
-             self.round()
+ bucket.weight_dtype, self.device)
@ megatron/parallel/factory.py | config/test_parts::test_layers_after
layers-of-ones-own-end-at-a-whole-stream
- settings["custom"] = custom
+ settings["custom"] = None
@ megatron/train/step.py | matrix[context=2-vit-mean-dropout-selective]
whole-samples-count-on-every-context-rank
- is_counted = each.token_order is not None or mesh.context.rank == 0
+ is_counted = True
@ megatron/train/step.py | matrix[tensor=4:2d-gpt2]
samples-of-the-rows-of-a-grid-are-not-counted
- for batch in micro_batches) * mesh.batch.size
+ for batch in micro_batches) * mesh.copies.size
@ megatron/data/order.py | data/test_order::test_the_order
four-to-the-power-of-k-samples-have-another-order
- ((size - 1).bit_length() + 1)
+ (size.bit_length() + 1)
@ megatron/data/order.py | data/test_order::test_within
a-data-set-may-be-one-ahead-of-its-share
- taken[i] * period < after * share
+ taken[i] * period <= after * share
@ megatron/data/sources.py | data/test_sources::test_data_set
a-larger-vocabulary-is-that-of-the-tokenizer
- return vocab_size or size
+ return size
@ megatron/train/evaluate.py | train/test_evaluate::test_a_validation
a-perplexity-beyond-all-numbers-ends-the-run
- inf if first > 700 else exp(first)
+ exp(first)
@ megatron/data/map_style.py | data/test_map_style::test_same_texts
a-column-of-categories-is-no-text
- kind.value_type if pa.types.is_dictionary(kind) else kind
+ kind
@ megatron/data/documents.py | data/test_sources::test_data_set
a-folder-goes-before-a-pair-of-its-name
- return not with_suffix(path, ".idx").is_file()
+ return True
@ megatron/data/indexed.py | data/test_indexed::test_shards
identity-has-the-first-shard-alone
- for shard in self.shards for sample in shard.samples]
+ for shard in self.shards[:1] for sample in shard.samples]
@ megatron/data/json_lines.py | tools/corpus/test_files::test_a_failing_disk
a-failing-disk-is-a-damaged-text
- if Path(file).suffix not in OPENERS or getattr(error, "errno", None):
+ if Path(file).suffix not in OPENERS:
@ megatron/config/help.py | config/test_help::test_short
short-help-has-both-of-a-pair
- for name, need in names.items() if "--" + name[5:] not in names}
+ for name, need in names.items()}
@ megatron/config/model.py | config/test_checks::test_refused
rope-scaling-of-equal-factors
- 0 < low < high < inf
+ 0 < low <= high < inf
@ megatron/config/training.py | checkpoint/test_resume::test_default
sgd-momentum-may-change
- sgd_momentum: float = field(default=0.9, metadata={"resume": "state"})
+ sgd_momentum: float = field(default=0.9)
a-data-set-of-ones-own-beside-a-named-one | config/test_checks::test_refused
- excludes(self, "dataset", "dataset_name")
+ excludes(self, "dataset", "data_path")
@ tools/corpus/evaluation.py | tools/corpus/test_decontaminate::test_a_file_that_changes
a-changed-evaluation-of-the-same-size-is-kept
- (state.st_size, state.st_mtime_ns)
+ (state.st_size, 0)
a-byte-order-mark-begins-a-passage | tools/corpus/test_decontaminate::test_passages_of_text
- "utf-8-sig"
+ "utf-8"
@ tools/corpus/dedup/__init__.py | tools/corpus/test_dedup::test_an_absurd
losses-of-a-hundred-documents-are-unchecked
- count.documents >= FEW
+ count.documents > FEW
the-smallest-clusters-first | tools/corpus/test_dedup::test_the_manifest
- (-cluster["size"], cluster
+ (cluster["size"], cluster
@ tools/corpus/dedup/index.py | tools/corpus/test_dedup::test_documents_of_one_id
ids-of-the-last-block-alone
- found |= keys[places]
+ found = keys[places]
sizes-in-characters | tools/corpus/test_dedup::test_the_manifest
- size = len(document.text.encode())
+ size = len(document.text)
@ tools/corpus/dedup/candidates.py | tools/corpus/test_dedup::test_another_band
all-bands-split-in-the-same-orders
- default_rng([salt, number])
+ default_rng(number)
@ tools/corpus/plan.py | tools/corpus/test_plan::test_what_cannot_fit
temporary-files-add-up
- used += each.disk
-         if need
+ used += each.disk + each.temporary
+         if need
a-plan-of-another-seed | tools/corpus/test_plan::test_the_command_refuses
- sample_bytes, seed, [job
+ sample_bytes, [job
more-workers-are-busy-than-there-are-units | tools/corpus/test_plan::test_no_more_workers
- core_seconds / busy
+ core_seconds / settings.workers
memory-of-one-worker | tools/corpus/test_plan::test_no_more_workers
- memory=busy * held
+ memory=held
@ tools/corpus/run.py | tools/corpus/test_plan::test_a_removal_far
a-plan-wins-over-the-file
- if removal is not None and "expected_removal" not in description.tables.get("dedup", {}):
+ if removal is not None:
a-run-ignores-its-memory | tools/corpus/test_run::test_the_usual_steps
- "scheduler", "memory", "compress"):
+ "scheduler", "compress"):
@ tools/corpus/readers.py | tools/corpus/test_extract::test_a_change_in
the-last-file-is-the-newest
- newest = max(newest, status.st_mtime_ns)
+ newest = status.st_mtime_ns
a-dot-in-the-ids-of-an-archive | tools/corpus/test_extract::test_bytes_that_are
- {member.name.removeprefix('./')}
+ {member.name}
@ tools/corpus/settings.py | tools/corpus/test_scheduler::test_slurm
paths-for-a-cluster-stay-relative
- if self.scheduler != "local":
+ if self.scheduler == "slurm":
@ tools/corpus/tokenize/settings.py | tools/corpus/tokenize/test_step::test_unknown_tokens
another-json-key-is-the-same-run
-             "json_key": self.json_key,
+             # without its key
@ tools/convert/vit.py | tools/convert/test_vit::test_import
pictures-are-resized-bilinearly
- "resample": 3,
+ "resample": 2,
@ tools/convert/vocabulary.py | tools/convert/test_used::test_trained_here
a-gpt2-of-any-length
- merges=pairs, model_max_length=positions
+ merges=pairs
a-folder-wins-over-the-flag | tools/convert/test_round_trip::test_casing
- if tokenizer_type is None and kind == Bert
+ if kind == Bert
carriage-returns-in-the-words | tools/convert/test_round_trip::test_no_tokenizer
- .replace("\r\n", "\n").removesuffix
+ .removesuffix
@ tools/convert/exporting.py | tools/convert/test_round_trip::test_several_files
weights-for-their-owner-alone
- file.chmod(0o644)
+ file.chmod(0o600)
generation-settings-are-made-anew | tools/convert/test_unmodified::test_runs
- if "generation_config.json" not in kept and bare
+ if bare
dtype-under-both-names | tools/convert/test_complete::test_printed_command
- "dtype" not in options and "torch_dtype"
+ "dtype" in options and "torch_dtype"
@ tools/convert/writing.py | tools/convert/legacy/test_dcp::test_check_weights
one-finite-logit-is-enough
- .isfinite().all()
+ .isfinite().any()
@ tools/convert_hf.py | tools/convert/test_round_trip::test_no_tokenizer
an-exported-tokenizer-is-not-compared
-             if tokenizer is not None:
-                 vocabulary.compare
+             if tokenizer is None:
+                 vocabulary.compare
@ tools/inspect_data.py | tools/test_inspect_data::test_statistics_of_gpt2
all-sources-weigh-the-same
- share = float(source.weight / total)
+ share = 1 / len(corpus.sources)
@ tools/lm_harness.py | tools/test_lm_harness::test_examples
examples-of-a-prompt-by-chance
- task.set_fewshot_seed(defaults.DEFAULT_OTHER_SEED)
+ task.set_fewshot_seed(None)
the-limit-is-lost
- limit=limit, bootstrap
+ limit=None, bootstrap
@ tools/train_tokenizer.py | tools/test_train_tokenizer::test_unknown_letters
equally-frequent-letters-as-they-come
- (-counts[letter], letter)
+ -counts[letter]
@ tools/compare_runs.py | tools/test_compare_runs::test_refusals
a-dtype-that-nothing-reads
- ("step", "samples", "dtype")
+ ("step", "samples")
@ tools/convert_dcp.py | tools/convert/legacy/test_dcp::test_export_warnings
a-warm-up-from-a-hundredth
- "lr_warmup_init", 0.1 * known
+ "lr_warmup_init", 0.01 * known
@ megatron/train/metrics.py | train/test_metrics::test_lines_are_written_after
half-a-line-stays-when-the-disk-is-full
-                     os.truncate(path, self._end)
+                     pass
a-console-that-is-behind | train/test_metrics::test_the_console
-             self.stream.flush()
+             pass
@ megatron/train/utilization.py | train/test_utilization::test_the_peak
a-peak-of-fp32
- if state.precision == "fp32":
+ if state.precision == "fp16":
@ megatron/train/evaluate.py | train/test_evaluate::test_a_model_of_a_checkpoint
a-loaded-model-drops
-     return model.eval()
+     return model
a-model-needs-the-kernels-of-its-run
- if config.layernorm_impl != "torch":
+ if config.layernorm_impl == "torch":
narrow-logits
- return logits.to(torch.promote_types(logits.dtype, torch.float32))
+ return logits
@ megatron/inference/generate.py | inference/test_generate::test_the_distribution
top-k-of-all-tokens-but-one
- 0 < sampling.top_k < scaled.shape[1]
+ 0 < sampling.top_k < scaled.shape[1] - 1
@ megatron/inference/samples.py | inference/test_samples::test_samples_are_logged
a-signal-waits-for-samples
- if end not in SIGNALS and self.training
+ if self.training
@ megatron/inference/samples.py | inference/test_samples::test_samples_are_logged
a-step-that-was-told-to-stop-samples
- if is_due and not result.stop:
+ if is_due:
@ megatron/models/cache.py | inference/test_unmodified::test_a_text
rows-that-ended-stay-in-a-cache-of-transformers
-             self.other.batch_select_indices(rows)
+             pass
@ megatron/train/evaluate.py | train/test_step::test_the_loss_is_the_mean
outputs-in-the-models-own-format
-     dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
+     dtype = next(model.parameters()).dtype
@ megatron/train/state.py | checkpoint/test_layouts::test_each_stage_starts
weights-that-are-not-rounded-from-masters
- mesh=self.mesh)
-         self.optimizer.publish()
+ mesh=self.mesh)
@ megatron/train/trained.py | train/test_trained::test_files_of_another
files-of-another-tokenizer-are-kept
- len(tokenizers) < 2
+ len(tokenizers) <= 2
@ megatron/train/trained.py | train/test_trained::test_a_checkpoint_brings
the-end-marks-of-the-config-go-first
- ("generation_config.json", "config.json"))
+ ("config.json", "generation_config.json"))
the-tokenizers-end-mark-is-one-more
- tuple(sorted(ends - {tokenizer.eod}))
+ tuple(sorted(ends))
the-first-word-of-mock-data-counts | train/test_trained::test_the_model_of_a_saved
- [-1:] != ["--mock-data"]
+ [:1] != ["--mock-data"]
other-threads-are-not-said | checkpoint/test_layouts::test_a_switch
- ("torch", "threads", "device", "layout")
+ ("torch", "device", "layout")
"""

EQUIVALENT = r"""
@ megatron/optim/schedule.py
warm-up-ends-a-step-early
# at update = warm-up both branches give the highest rate
- if update <= warmup:
+ if update < warmup:
@ megatron/parallel/partition.py
stage-of-least-cost-later
# min takes the first of equal costs either way
- key=lambda each: (each in fixed, costs[each]))
+ key=lambda each: (each in fixed, costs[each], each))
@ megatron/parallel/schedules.py
warm-up-of-gpipe-beyond-its-forwards
# a slice beyond the end of a list is its end
- warm_up = micro_batches if kind == "gpipe"
+ warm_up = micro_batches + 1 if kind == "gpipe"
"""


if __name__ == "__main__":
    raise SystemExit(main())
