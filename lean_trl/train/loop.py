"""From settings to a trained model on disk: the one loop that every method runs through.

    set_up   everything that can fail cheaply (settings, tokenizer, rows) first, then the model
    fit      windows -> train_step -> metrics.jsonl, evaluation
    export   model/ in the layout that transformers and vLLM load

Run it with `torchrun scripts/train.py recipe.yaml`.
"""

from __future__ import annotations

import signal
from pathlib import Path

from lean_trl.config import Config
from lean_trl.model.loader import save_model
from lean_trl.model.value_head import RewardModel
from lean_trl.rollout.feed import RolloutFeed
from lean_trl.techniques.adapter_files import adapter_weights, save_adapter
from lean_trl.techniques.adapters import Adapters
from lean_trl.techniques.apply import before_cuda
from lean_trl.techniques.shard import kept_whole
from lean_trl.train.distributed import World, join_world
from lean_trl.train.evaluate import evaluate
from lean_trl.train.optim import set_learning_rate
from lean_trl.train.resume import export_weights, save
from lean_trl.train.schedule import lr_factor
from lean_trl.train.score import move_reference, referenced
from lean_trl.train.setup import Run, set_up
from lean_trl.train.showcase import is_builtin_task, show
from lean_trl.train.signals import STOP, Signals
from lean_trl.train.step import train_step
from lean_trl.train.watchdog import Place, Watchdog


def train(config: Config) -> None:
    """Run the settings from start to end: train (or only evaluate) and write `output_dir`."""
    before_cuda(config)
    timeout_s = config.distributed.timeout_s
    with join_world(timeout_s) as world, Watchdog(world, timeout_s) as watchdog:
        train_as(world, config, watchdog.place)


def train_as(world: World, config: Config, place: Place | None = None) -> None:
    """What one rank does of `train`; it notes in `place` what it is at."""
    run = set_up(config, world)
    run.place = place or run.place
    run.place.reading = run.train_feed.reading
    if run.step == 0 or config.eval_only:
        report_evaluation(run)
        report_showcase(run)
    if not config.eval_only:
        with Signals(world.group) as signals:
            stopped = fit(run, signals)
        if stopped:
            run.say(f"stopped by SIGTERM after step {run.step}; the same command goes on")
            raise SystemExit(128 + signal.SIGTERM)
        report_evaluation(run)
        report_showcase(run, samples=3)
        export(run)
    run.log.close()


def fit(run: Run, signals: Signals) -> bool:
    """One optimizer step for each window of the feed; True when a signal ended it early.

    The last step is saved in any case.
    """
    settings, steps, every = run.config.train, run.train_feed.steps, run.config.checkpoint.every
    run.model.train()
    run.log.pause()
    run.place.step = run.step + 1
    feed = run.train_feed
    online = isinstance(feed, RolloutFeed)  # it asks the reference once for each generation
    for window in referenced(feed, None if online else run.reference):
        factor = lr_factor(settings.lr_scheduler, run.step, steps, settings.warmup_steps)
        learning_rate = settings.learning_rate * factor
        set_learning_rate(run.optimizer, learning_rate)
        report = train_step(
            run.model,
            window.batches,
            run.method,
            run.optimizer,
            totals=window.totals,
            max_grad_norm=settings.max_grad_norm,
            around=run.place.follow(window.batches, run.around),
            group=run.world.group,
        )
        run.step += 1
        run.place.step, run.place.rows = run.step + 1, ()
        if isinstance(feed, RolloutFeed):
            feed.after_step(report)
        sync_reference(run)
        run.log.add(
            run.step,
            report,
            learning_rate=learning_rate,
            epoch=window.epoch,
            tokens=window.totals["processed"],
            empty=window.totals[run.method.unit] == 0,
            known=window.metrics,
        )
        if settings.eval_every and run.step % settings.eval_every == 0 and run.step != steps:
            report_evaluation(run)
        asked = signals.agreed()
        if asked or (every and run.step % every == 0):
            save(run)
        if asked == STOP and run.step != steps:
            run.checkpoints.wait()
            return True
    save(run)
    run.checkpoints.wait()
    run.log.flush()
    return False


def sync_reference(run: Run) -> None:
    """Move the reference towards the policy, every so many steps."""
    loss = run.config.loss
    if loss.sync_ref_model and run.step % loss.ref_model_sync_steps == 0:
        assert run.reference is not None
        move_reference(run.reference, run.model, loss.ref_model_mixup_alpha)


def report_evaluation(run: Run) -> None:
    """Held-out loss, printed and written to metrics.jsonl, when there are held-out rows."""
    if run.eval_feed is None:
        return
    run.log.flush()  # weights that are spoilt are not worth a number
    windows = referenced(run.eval_feed, run.reference)
    metrics = evaluate(run.model, windows, run.method, group=run.world.group)
    run.log.write_evaluation(run.step, metrics)
    run.say(
        f"step {run.step}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    )
    run.log.pause()


def report_showcase(run: Run, *, samples: int = 0) -> None:
    """Right answers to held-out questions, and some of them, when the task is the built-in one."""
    if not is_builtin_task(run.config):
        return
    with kept_whole(run.model, run.config):
        showcase = show(run.model, run.tokenizer)
    run.log.write_evaluation(run.step, showcase.metrics())
    run.say(f"step {run.step}: exact match {showcase}")
    if samples:
        run.say(showcase.samples(samples))
    run.log.pause()


def export(run: Run) -> None:
    """Write `output_dir`/model: configs, safetensors, tokenizer and chat template."""
    if not run.config.checkpoint.export_hf:
        return
    adapters = run.around.find(Adapters)
    if adapters is not None:
        folder = Path(run.config.output_dir) / "adapter"
        added = adapter_weights(run.model, adapters)
        if run.world.is_main:
            save_adapter(run.model, adapters, added, folder)
            run.tokenizer.save(folder)
        run.say(f"adapter written to {folder}; scripts/export.py makes a whole model of it")
        return
    folder = Path(run.config.output_dir) / "model"
    weights = export_weights(run)
    if isinstance(run.model, RewardModel):
        run.model.set_pad_id(run.tokenizer.pad_id)
    if run.world.is_main:
        save_model(run.model, folder, weights=weights)
        run.tokenizer.save(folder)
    run.say(f"model written to {folder}")
