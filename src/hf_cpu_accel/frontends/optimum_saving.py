"""How the Optimum-style classes are written to folders and to the hub: as ordinary checkpoints, or packed."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from torch import Tensor

from hf_cpu_accel.frontends import packed_saving
from hf_cpu_accel.patching.acceleration import acceleration_of
from hf_cpu_accel.rewrite.saved import original_state

# The arguments of `push_to_hub` besides the name of the repository.
_OPTIONS = ("private", "token", "revision", "create_pr", "commit_message", "commit_description")


class Saved:
    """The methods of `CPUModel` that write it; they take the arguments that transformers' and optimum's own do."""

    model: Any
    preprocessors: list[Any]

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        push_to_hub: bool = False,
        *,
        packed: bool | None = None,
        repository_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Write an ordinary checkpoint with the original weights, or packed ones, plus cpu_accel_config.json.

        Plain transformers loads an ordinary one. What is written are the kept originals, which takes the memory of
        the unpacked weights meanwhile.

        Args:
            save_directory: made if there is none.
            push_to_hub: upload it afterwards, to `repository_id`, or to one of the name of the folder.
            packed: True: the packed weights, as in `packed-files.md`; None: as the model was loaded.
            **kwargs: options of `push_to_hub`, and of transformers' own `save_pretrained`.

        Returns:
            What `push_to_hub` gives, if asked for it.

        Raises:
            RuntimeError: the originals were dropped (`CPUAccelConfig(originals="drop")`), so that there is
                nothing to write.
            ValueError: `packed=True` of a model that is not accelerated.
        """
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        hub, options = _split_options(kwargs)
        for preprocessor in self.preprocessors:
            preprocessor.save_pretrained(directory)
        self._save_pretrained(directory, packed=packed, **options)
        if push_to_hub:
            return _upload(directory, repository_id or directory.name, **hub)

    def _save_pretrained(self, save_directory: Path, *, packed: bool | None = None, **options: Any) -> None:
        acceleration = acceleration_of(self.model)
        as_packed = packed or (packed is None and acceleration is not None and acceleration.from_file)
        if acceleration is not None and not as_packed:
            acceleration.journal.check()
        plainly = inspect.unwrap(
            type(self.model).save_pretrained
        )  # whether the keyword `packed` is there or not
        packed_saving.save(plainly, self.model, save_directory, packed, (), options)
        if acceleration is not None and not as_packed:  # a packed folder has its settings already
            acceleration.config.save(save_directory)

    def push_to_hub(
        self,
        save_directory: str | os.PathLike[str],
        repository_id: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        *,
        packed: bool | None = None,
        **options: Any,
    ) -> Any:
        """Upload the model: `push_to_hub("me/fast")`, or what a folder holds: `push_to_hub("folder", "me/fast")`.

        Args:
            save_directory: the name of the repository, as in transformers; with `repository_id` a folder that
                `save_pretrained` wrote, as in optimum.
            packed: as in `save_pretrained`.
            options: `revision`, `create_pr`, `commit_message`, `commit_description`.

        Returns:
            The `huggingface_hub.CommitInfo`.

        Raises:
            ValueError: `packed` together with a folder that is written already.
        """
        options.update(private=private, token=token)
        if repository_id is None:
            with TemporaryDirectory() as folder:
                self.save_pretrained(folder, packed=packed)
                return _upload(Path(folder), str(save_directory), **options)
        if packed is not None:
            raise ValueError(
                f"packed={packed}: {str(save_directory)!r} is uploaded as save_pretrained wrote it"
            )
        return _upload(Path(save_directory), repository_id, **options)

    def state_dict(self) -> dict[str, Tensor]:
        """The original weights by their names, as in the checkpoint: they are packed in the model meanwhile.

        Raises:
            RuntimeError: they are gone (`originals="drop"`, or loaded from a packed folder).
        """
        acceleration = acceleration_of(self.model)
        return (
            self.model.state_dict()
            if acceleration is None
            else original_state(self.model, acceleration.journal)
        )


def _split_options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is for the hub, the rest)."""
    hub = {name: value for name, value in kwargs.items() if name in _OPTIONS}
    return hub, {name: value for name, value in kwargs.items() if name not in _OPTIONS}


def _upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
) -> CommitInfo:
    """Upload all files of `folder` in one commit, to a repository that is made if there is none.

    Raises:
        ValueError: `folder` is none.
        huggingface_hub.errors.HfHubHTTPError: the hub refuses.
    """
    if not folder.is_dir():
        raise ValueError(f"save_directory={str(folder)!r}: expected the folder that save_pretrained wrote")
    api = HfApi(token=token, library_name="hf_cpu_accel")
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
    )
