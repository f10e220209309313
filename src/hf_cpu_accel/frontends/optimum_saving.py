"""Save the classes `CPUModelFor<Task>` to folders and to the Hub, as ordinary checkpoints or packed."""

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

# The arguments of `push_to_hub` except the name of the repository.
_OPTIONS = ("private", "token", "revision", "create_pr", "commit_message", "commit_description")


class Saved:
    """The methods of `CPUModel` that save it, with the arguments of transformers and optimum."""

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
        """Write a checkpoint and cpu_accel_config.json: the original weights, which plain transformers loads, or the packed ones.

        Writing the original weights needs memory for them.

        Args:
            save_directory: folder to write, created if needed.
            push_to_hub: upload the folder afterwards.
            packed: True for the packed weights, False for the original ones, None for the format that the model was loaded from.
            repository_id: repository for `push_to_hub`; None for the name of the folder.
            **kwargs: options of `push_to_hub`, and of `save_pretrained` of transformers.

        Returns:
            The result of `push_to_hub`, or None without it.

        Raises:
            RuntimeError: the original weights were dropped (`CPUAccelConfig(originals="drop")`).
            ValueError: `packed=True` for a model that is not accelerated.
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
        original = inspect.unwrap(type(self.model).save_pretrained)  # without the keyword `packed`
        packed_saving.save(original, self.model, save_directory, packed, (), options)
        if acceleration is not None and not as_packed:  # a packed folder already contains its settings
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
        """Upload the model, `push_to_hub("me/fast")`, or a saved folder, `push_to_hub("folder", "me/fast")`.

        Args:
            save_directory: name of the repository, as in transformers; with `repository_id` a folder that `save_pretrained`
                wrote, as in optimum.
            repository_id: name of the repository for a saved folder.
            private: create a private repository.
            token: token of the Hub.
            packed: see `save_pretrained`.
            options: `revision`, `create_pr`, `commit_message`, `commit_description`.

        Returns:
            The `huggingface_hub.CommitInfo`.

        Raises:
            ValueError: `packed` with a saved folder.
        """
        options.update(private=private, token=token)
        if repository_id is None:
            with TemporaryDirectory() as folder:
                self.save_pretrained(folder, packed=packed)
                return _upload(Path(folder), str(save_directory), **options)
        if packed is not None:
            raise ValueError(
                f"packed={packed} is not supported with the saved folder {str(save_directory)!r}: leave packed out, or pass it to "
                "save_pretrained"
            )
        return _upload(Path(save_directory), repository_id, **options)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the original weights with their names in the checkpoint.

        Raises:
            RuntimeError: the original weights are not available (`originals="drop"`, or a packed folder).
        """
        acceleration = acceleration_of(self.model)
        return (
            self.model.state_dict()
            if acceleration is None
            else original_state(self.model, acceleration.journal)
        )


def _split_options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (options of `push_to_hub`, other options)."""
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
    """Upload all files of `folder` in one commit, to a repository that is created if needed.

    Raises:
        ValueError: `folder` does not exist.
        huggingface_hub.errors.HfHubHTTPError: the Hub rejects the upload.
    """
    if not folder.is_dir():
        raise ValueError(
            f"save_directory={str(folder)!r} does not exist: expected a folder that save_pretrained wrote"
        )
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
