"""The registry of metric keys: every key that may stand in ``metrics.jsonl``, with its unit and its meaning.

A key that is not declared here is refused by the writer, so a renamed or misspelt metric fails in a test and never
silently starts a new curve. A key that ends in ``/*`` declares a family (one member a reason or an actor).
``python -m asyncrl.report.keys > docs/metrics.md`` writes the table; a test compares the two.

Units: ``count``, ``share`` (0 to 1), ``s`` (seconds), ``tokens``, ``tokens/s``, ``bytes``, ``nat`` (log-probabilities
and entropies), ``1`` (a plain number), ``text`` (the only one whose values are strings).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

UNITS = ("count", "share", "s", "tokens", "tokens/s", "bytes", "nat", "1", "text")


class UndeclaredMetric(KeyError):
    """A metric key that the registry does not know; the text names the nearest declared key."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Metric:
    """One declared key. ``total`` marks numbers that count from the start of the run, not since the last step."""

    key: str
    unit: str
    meaning: str
    total: bool = False

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"{self.key}: unit {self.unit!r} is not one of {', '.join(UNITS)}")


M = Metric

AXES = (
    M("step", "count", "optimizer steps done, skipped ones included; equals the weight version"),
    M("time_s", "s", "since this attempt of the run started"),
    M("attempt", "count", "0 for the first start of the run, one more for each resume"),
    M("step_s", "s", "wall time since the previous step was reported"),
)

LEARNING = (
    M("reward/mean", "1", "mean reward of the samples trained in this step"),
    M("reward/std", "1", "standard deviation of the same rewards"),
    M("reward/group_std_mean", "1", "mean over the step's groups of the standard deviation inside a group"),
    M(
        "eval/accuracy",
        "share",
        "share of held-out items whose greedy answer scores 1 (mode sft: of eval.generations); on a line of its own. "
        "sft.loss=dpo: of held-out pairs whose chosen answer has the larger implicit reward, ties half",
    ),
    M(
        "eval/loss",
        "nat",
        "mode sft: mean negative log-likelihood of a learnt token of the held-out conversations; sft.loss=dpo: mean "
        "loss of a held-out pair",
    ),
    M("eval/margin", "nat", "sft.loss=dpo: dpo/margin of the held-out pairs"),
    M("eval/likelier", "share", "sft.loss=dpo: dpo/likelier of the held-out pairs"),
    M("eval/items", "count", "held-out items evaluated"),
    M("eval/failed", "count", "held-out items without a score (reward failure); they count as 0 in the accuracy"),
    M("eval/failed/*", "count", "mode sft: the same by reason"),
    M("eval/unreadable", "count", "held-out answers that the task's scorer raised on; they count as 0"),
    M("eval/too_long", "count", "held-out items left out because their prompts exceed the model's length"),
    M("eval/seconds", "s", "wall time of the evaluation"),
    M("eval/answers", "count", "mode sft: held-out prompts answered (eval.generations)"),
    M("eval/ended_share", "share", "mode sft: of these answers, those that the model ended before eval.max_tokens"),
    M("sample/length_mean", "tokens", "completion tokens a sample, mean over the step"),
    M("sample/length_max", "tokens", "longest completion of the step"),
    M("sample/truncated_share", "share", "samples that the engine ended at max_tokens"),
    M("sample/empty", "count", "samples of zero tokens (no gradient)"),
    M("sample/cut", "count", "mode sft: examples of the step that were cut to sft.max_length tokens"),
    M("sample/split", "count", "mode sft: examples that were split into pieces of that length"),
    M("sample/skipped", "count", "mode sft: longer ones left out, or cut before the first learnt token"),
)

DATA = (
    M("data/skipped", "count", "mode sft: records passed over because they cannot be learnt", total=True),
    M("data/skipped/*", "count", "the same by reason", total=True),
)

TRAINING = (
    M(
        "train/loss",
        "1",
        "loss over the global batch: the policy loss, in mode sft the mean negative log-likelihood or (sft.loss=dpo) "
        "the mean loss of a pair",
    ),
    M(
        "train/grad_norm",
        "1",
        "global gradient norm before clipping; with optim.accumulation=momentum or adama and several micro-batches its "
        "upper bound, the sum over them",
    ),
    M("train/lr", "1", "learning rate of the step"),
    M("train/entropy", "nat", "entropy of the trainer's distribution, mean over trained tokens"),
    M("train/advantage_abs_mean", "1", "mean absolute advantage over trained tokens"),
    M("train/ratio_mean", "1", "pi over mu (the engine's probability), mean over trained tokens"),
    M("train/ratio_max", "1", "largest pi over mu"),
    M("train/ratio_sequence_mean", "1", "product over a sample of pi over mu, mean over samples"),
    M("train/ratio_geometric_mean", "1", "geometric mean over a sample of pi over mu, mean over samples"),
    M("train/ess_share", "share", "effective sample size of the token ratios over their number"),
    M("train/clip_low_share", "share", "trained tokens whose gradient the lower clip removed"),
    M("train/clip_high_share", "share", "trained tokens whose gradient the upper clip removed"),
    M("train/kl_behaviour", "nat", "k3 estimate of KL(mu || pi) over trained tokens"),
    M("train/tokens", "tokens", "completion tokens in this step's loss"),
    M("train/samples", "count", "samples in this step's loss"),
    M("train/micro_batches", "count", "micro-batches a rank"),
    M("train/padding_share", "share", "positions computed that hold no token"),
    M(
        "train/packing_efficiency",
        "share",
        "mode sft: tokens of the step over what its micro-batches hold (ranks x micro-batches x trainer.token_budget)",
    ),
    M("train/skipped", "text", "reason why the step left the weights unchanged; absent when it did not"),
    M("train/skipped_total", "count", "skipped steps", total=True),
    M("train/clip_scale", "share", "what delayed clipping multiplied the loss by"),
    M("train/guarded_units", "count", "units (layers) whose gradient was cut to a multiple of its usual norm"),
    M("train/partial_units", "count", "units that kept their weights because their gradient was not finite"),
    M("train/partial_total", "count", "steps with such units, or refused with gradients in the state", total=True),
    M("mismatch/abs_mean", "nat", "mean |log pi - log mu| on samples of one version, scored by that version"),
    M("mismatch/abs_max", "nat", "largest of the same"),
    M("mismatch/tokens", "tokens", "tokens it was measured on"),
    M(
        "mismatch/age/*",
        "nat",
        "mean |log pi - log mu| by staleness in steps: 1 to 6, 7+, and mixed (several versions)",
    ),
    M("mismatch/floor_abs_mean", "nat", "mean |log pi - log pi| of the trainer's own scores in two layouts of a batch"),
    M("mismatch/floor_abs_max", "nat", "largest of the same; every report.noise_floor_every steps"),
    M("mismatch/floor_tokens", "tokens", "tokens it was measured on"),
)

PREFERENCES = (
    M("dpo/reward_chosen", "nat", "implicit reward of the chosen answer, beta log(pi/ref), mean over the step's pairs"),
    M("dpo/reward_rejected", "nat", "the same of the rejected answer"),
    M("dpo/margin", "nat", "their difference"),
    M("dpo/accuracy", "share", "pairs whose chosen answer has the larger implicit reward, ties half"),
    M("dpo/logp_chosen", "nat", "log-prob of the chosen answer under the policy, mean over the step's pairs"),
    M("dpo/logp_rejected", "nat", "the same of the rejected answer"),
    M("dpo/likelier", "share", "pairs whose chosen answer is the likelier one under the policy alone, ties half"),
)

FLOW = (
    M("staleness/mean", "count", "steps between the version that drew a token and the one it trains, mean over tokens"),
    M("staleness/max", "count", "largest of the same; never above staleness.max_steps"),
    M("staleness/mixed_share", "share", "samples whose tokens were drawn by more than one version"),
    M("tokens/generated", "tokens", "completion tokens received from generators", total=True),
    M("tokens/trained", "tokens", "completion tokens in a loss; mode sft: learnt tokens", total=True),
    M("tokens/generated_per_s", "tokens/s", "generated since the previous step"),
    M("tokens/trained_per_s", "tokens/s", "trained since the previous step"),
    M("groups/dispatched", "count", "groups admitted to a slot", total=True),
    M("groups/trained", "count", "groups whose batch was committed with changed weights", total=True),
    M("groups/skipped", "count", "groups of skipped steps", total=True),
    M("groups/skipped/*", "count", "the same by reason", total=True),
    M("groups/filtered", "count", "groups dropped for equal rewards", total=True),
    M("groups/failed", "count", "groups given up", total=True),
    M("groups/failed/*", "count", "the same by reason", total=True),
    M("groups/buffered", "count", "finished groups that wait for a batch"),
    M("groups/in_training", "count", "groups in a batch that is not committed yet"),
    M("groups/in_flight", "count", "groups that generators or reward workers still hold"),
    M("prompts/epoch", "count", "passes over the training items begun, the first is 0"),
    M("prompts/too_long", "count", "prompts longer than max_model_len allows, never cut", total=True),
    M("reward/unreadable", "count", "sampled answers that the task's scorer raised on; they are worth 0", total=True),
    M("reward/failed/*", "count", "samples whose reward failed, by reason", total=True),
)

MACHINE = (
    M("time/train_s", "s", "a trainer's time from batch received to step done"),
    M("time/forward_backward_s", "s", "of it: forward and backward"),
    M("time/optimizer_s", "s", "of it: clipping and optimizer"),
    M("time/gather_wait_s", "s", "of it: waiting until the gathers of the last push had ended"),
    M("time/batch_wait_s", "s", "a trainer's wait for the batch"),
    M("time/checkpoint_hold_s", "s", "of a checkpoint begun after the previous step: training waited for the copy"),
    M(
        "time/checkpoint_write_s",
        "s",
        "of the newest checkpoint that was completed since the previous step: writing it",
    ),
    M("idle/generator", "share", "of the training span in which a generator ran no request, mean over generators"),
    M("idle/trainer", "share", "of the training span in which the trainer computed no step"),
    M("sync/seconds", "s", "announce to the last commit, of the newest finished push"),
    M("sync/seconds_total", "s", "the same over all pushes", total=True),
    M("sync/pause_s", "s", "of it: generation paused to load and compare, longest engine"),
    M("sync/bytes", "bytes", "weight bytes sent to one engine"),
    M("sync/count", "count", "pushes committed", total=True),
    M("weights/version/*", "count", "version that a generator serves, as its last finished push proved"),
    M("weights/digest/*", "text", "digest of that version, computed by the engine from what it loaded"),
    M("generators/live", "count", "generators that serve prompts"),
    M("generators/restarts", "count", "generator processes started in the place of one that had died", total=True),
    M("report/nonfinite", "count", "metric values that were NaN or infinite and were written as null", total=True),
    M("report/lost_lines", "count", "lines of metrics.jsonl that the file system refused", total=True),
    M("report/wandb_dropped", "count", "records that did not reach W&B", total=True),
)

SECTIONS = {
    "Axes": AXES,
    "Learning": LEARNING,
    "Data": DATA,
    "Training step": TRAINING,
    "Preferences (mode sft with sft.loss=dpo)": PREFERENCES,
    "Staleness, tokens and groups": FLOW,
    "Time and machine": MACHINE,
}
REGISTRY: dict[str, Metric] = {metric.key: metric for section in SECTIONS.values() for metric in section}


def declared(key: str) -> Metric:
    """The declaration of ``key``.

    Raises:
        UndeclaredMetric: no such key and no family that covers it.
    """
    metric = REGISTRY.get(key)
    if metric is None and "/" in key:
        metric = REGISTRY.get(key.rpartition("/")[0] + "/*")
    if metric is None or key.endswith("/*"):
        near = difflib.get_close_matches(key, REGISTRY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UndeclaredMetric(f"metric {key!r} is not declared in asyncrl/report/keys.py{hint}")
    return metric


def table() -> str:
    """The text of ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "Every key of `<run>/metrics.jsonl` and of the W&B run. Written by `python -m asyncrl.report.keys`.",
        "",
        "The file holds one JSON object a step, and one for each held-out evaluation (its axes and `eval/*` only),",
        "because an evaluation ends after later steps have been reported. A number that is NaN or infinite is `null`",
        "and is counted in `report/nonfinite`. After a resume the steps that are done again appear again with a higher",
        "`attempt`; `asyncrl.report.metrics.read_metrics` merges the file to one record a step and keeps the latest.",
        'A "total" counts from the start of the run, everything else describes the step.',
        "",
        "Durability: each line is one `write`, so it survives the death of the process; the file is fsynced at most",
        "every 30 s and when the run ends, so a power cut can cost the lines of the last 30 s.",
    ]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", "| key | unit | meaning |", "|---|---|---|"]
        for metric in section:
            meaning = metric.meaning.replace("|", "\\|") + (" (total)" if metric.total else "")
            lines.append(f"| `{metric.key}` | {metric.unit} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
