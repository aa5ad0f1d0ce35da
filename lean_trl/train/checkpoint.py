"""Checkpoints: complete or absent, checked before they are used, and never unpickled.

    checkpoints/step-500/shard-00000.safetensors ...   tensors, each rank its part
                         state.json                    everything else, and the sha256 of each file

A checkpoint is written as step-500.partial, fsynced and renamed, so a run that is killed at any
moment leaves the last complete one alone. What to write where is planned by torch's distributed
checkpointing, whose readers cut the tensors anew for another number of ranks.
"""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
)

from lean_trl.train.checkpoint_files import (
    OtherFormat,
    ShardWriter,
    fsync,
    problems_of,
    read_manifest,
    saved_sizes,
    write_manifest,
)
from lean_trl.train.distributed import local_part

PARTIAL, REMOVED, CORRUPT, DRY_RUN = ".partial", ".removed", ".corrupt", "dry-run"


class Checkpointer:
    """The checkpoints of a run. All ranks call every method, in the same order.

    folder: output_dir/checkpoints. group: the ranks; None: one. keep: how many of the newest stay;
    None: all. background: write in a thread, from a copy in CPU memory; then group must be one that
    nothing else uses. event: called at the points of a save where a test may kill the process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        group: dist.ProcessGroup | None = None,
        keep: int | None = None,
        background: bool = False,
        event: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.folder, self.group, self.keep = folder, group, keep
        self.background, self.event = background, event
        self.is_main = group is None or dist.get_rank(group) == 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write step-`step`.

        tensors: this rank's view of every tensor, DTensors or whole; a name on one rank only is
        that rank's own. state: whatever JSON holds, the same on every rank. Raises what writing
        raised on any rank; in the background it is the next call that raises.
        """
        self.wait()
        assert not (self.folder / f"step-{step}").exists(), f"step {step} is saved already"
        local = {name: local_part(tensor)[0] for name, tensor in tensors.items()}
        text = json.dumps(state)  # now: the caller may change it while a thread writes
        if not self.background:
            self._write(f"step-{step}", dict(tensors), local, step, text)
            return
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in local.items()}
        arguments = (f"step-{step}", dict(tensors), copies, step, text)
        # A daemon: a rank that fails must not wait for ranks that will never answer its thread.
        self._thread = threading.Thread(
            target=self._write_later, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Until a save in the background is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def dry_run(self, num_bytes: int) -> None:
        """Save next to nothing and remove it: what would fail at step 500 fails before step 1.

        num_bytes: of a whole checkpoint, over all ranks. Raises ValueError when they do not fit, or
        when a rank does not see what another has written.
        """
        rank = 0 if self.group is None else dist.get_rank(self.group)
        probe = {f"probe.{rank}": torch.zeros(1)}
        self._write(DRY_RUN, probe, probe, 0, "{}", prune=False)
        blind = self._gather([] if (self.folder / DRY_RUN / "state.json").is_file() else [rank])
        free = shutil.disk_usage(self.folder).free
        if self.is_main:
            shutil.rmtree(self.folder / DRY_RUN)
        if blind:
            raise ValueError(
                f"ranks {blind} do not see the checkpoints in {self.folder}: "
                "output_dir must lie on a file system that all hosts share"
            )
        if free < num_bytes:
            raise ValueError(
                f"a checkpoint takes {num_bytes / 2**30:.1f} GiB, and {self.folder} has "
                f"{free / 2**30:.1f} GiB left: free some, or set another output_dir"
            )

    def newest(self, *, tidy: bool = True) -> Path | None:
        """The newest checkpoint whose files are what was written.

        A damaged one is named, set aside as step-N.corrupt, and the one before it is tried. tidy:
        remove what interrupted saves have left; False touches nothing, as another run may be at
        work here.
        """
        if self.is_main and tidy:
            for name in self._leftovers():
                shutil.rmtree(name)
        for path in self._share(self._complete()):
            problems = self._share_problems(path)
            if not problems:
                return path
            if self.is_main and not tidy:
                print(f"checkpoint {path} is damaged: " + "; ".join(problems))
            elif self.is_main:
                aside = path.with_name(path.name + CORRUPT)
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                print(f"checkpoint {path} is damaged, now {aside.name}: " + "; ".join(problems))
        return None

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill `tensors` in place, cut as they are now; returns the state.

        Raises ValueError when a tensor is not in the checkpoint or has another shape.
        """
        sizes = saved_sizes(path)
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != sizes.get(name):
                raise ValueError(
                    f"{path} has {name} as {sizes.get(name)}, this run as {tuple(tensor.shape)}: "
                    "resume with the model and settings that it was saved with"
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process is no group
            dcp.load(
                {name: tensor.detach() for name, tensor in tensors.items()},
                storage_reader=HuggingFaceStorageReader(str(path)),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=self.group,
                no_dist=self.group is None,
            )
        return read_manifest(path)["state"]

    def _write_later(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as failure:  # raised by the next wait()
            self._failure = failure

    def _write(
        self,
        name: str,
        tensors: dict[str, Tensor],
        local: dict[str, Tensor],
        step: int,
        state: str,
        prune: bool = True,
    ) -> None:
        partial = self.folder / (name + PARTIAL)

        def commit(files: dict[str, dict[str, Any]]) -> None:
            self.event("before_manifest")
            write_manifest(partial, {"step": step, "files": files, "state": json.loads(state)})
            self.event("before_rename")
            fsync(partial)
            partial.rename(self.folder / name)
            fsync(self.folder)
            self.event("after_rename")
            if prune:
                self._prune()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process is no group
            try:
                dcp.save(
                    tensors,
                    storage_writer=ShardWriter(partial, local, commit, self.event),
                    planner=DefaultSavePlanner(flatten_state_dict=False),
                    process_group=self.group,
                    no_dist=self.group is None,
                )
            except CheckpointException as failure:
                causes = [f"rank {rank}: {why[0]!r}" for rank, why in failure.failures.items()]
                raise OSError(f"{partial} was not written: {'; '.join(causes)}") from failure

    def _complete(self) -> list[Path]:
        """Newest first."""
        found = {
            int(path.name.removeprefix("step-")): path
            for path in self.folder.glob("step-*")
            if path.name.removeprefix("step-").isdecimal()
        }
        return [found[step] for step in sorted(found, reverse=True)]

    def _leftovers(self) -> list[Path]:
        """Of saves, removals and dry runs that were interrupted."""
        patterns = (f"*{PARTIAL}", f"*{REMOVED}", DRY_RUN)
        return [path for pattern in patterns for path in self.folder.glob(pattern)]

    def _prune(self) -> None:
        if self.keep is None:
            return
        for path in self._complete()[self.keep :]:
            removed = path.with_name(path.name + REMOVED)
            path.rename(removed)  # at once: half of a checkpoint must not look like one
            self.event("clean_up")
            shutil.rmtree(removed)

    def _share(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def _share_problems(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint; each rank reads its share of the files."""
        files, problems = self._share(self._files_of(path) if self.is_main else None)
        if self.group is None or problems:
            return problems or problems_of(path, files, 0, 1)
        ranks = dist.get_world_size(self.group)
        return self._gather(problems_of(path, files, dist.get_rank(self.group), ranks))

    def _gather(self, mine: list[Any]) -> list[Any]:
        """The lists of all ranks as one, in their order."""
        if self.group is None:
            return mine
        lists: list[list[Any]] = [[]] * dist.get_world_size(self.group)
        dist.all_gather_object(lists, mine, group=self.group)
        return [item for part in lists for item in part]

    def _files_of(self, path: Path) -> tuple[dict[str, Any], list[str]]:
        """What the manifest lists, or why it cannot be read. Rank 0 alone reads it, so that all
        ranks go on alike."""
        try:
            return read_manifest(path)["files"], []
        except OtherFormat:
            raise
        except ValueError as error:
            return {}, [str(error)]
