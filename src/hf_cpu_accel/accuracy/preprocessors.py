"""What turns texts, images and sound into inputs of a model: that of the pipeline, or the one beside the model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.accuracy.calls import Call, named_call

_LONGEST = 512  # tokens


class Preprocessors:
    """Of one target and its one model.

    Args:
        target: what the user has.
        model: the model in it, or itself.
    """

    def __init__(self, target: Any, model: nn.Module) -> None:
        self._target, self._model = target, model
        # A SentenceTransformer takes one mapping, and has a method for what goes into it.
        self._preprocess = getattr(model, "preprocess", None) or getattr(model, "tokenize", None)

    @property
    def takes_texts(self) -> bool:
        return self._preprocess is not None or self._tokenizer is not None

    def of_text(self, text: Any, name: str) -> Call:
        """
        Raises:
            TypeError: there is no tokenizer.
        """
        if self._preprocess is not None:
            return Call((self._preprocess([text]),), {}, name)
        if self._tokenizer is None:
            raise self._nothing_for("texts", "tokenizer", name)
        texts = (text,) if isinstance(text, str) else text  # or a pair of them
        tokens = self._tokenizer(*texts, return_tensors="pt", truncation=True, max_length=self._longest)
        inputs = {key: value for key, value in tokens.items() if isinstance(value, Tensor)}
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]
        return self.of_inputs(inputs, name)

    def of_inputs(self, inputs: Mapping[str, Any], name: str) -> Call:
        """
        Raises:
            TypeError: something in it has no name.
        """
        if not inputs or not all(isinstance(key, str) for key in inputs):
            raise TypeError(f"{name} is a dict of {list(inputs)}: expected the names of inputs")
        if self._preprocess is not None:
            return Call((dict(inputs),), {}, name)
        return named_call(self._model, inputs, name)

    def of_image(self, image: Any, name: str) -> Call:
        """
        Raises:
            TypeError: there is no image processor.
        """
        processor = self._processor("image_processor", "AutoImageProcessor")
        if processor is None:
            raise self._nothing_for("images", "image processor", name)
        return self.of_inputs(processor(images=image, return_tensors="pt"), name)

    def of_sound(self, sound: Any, name: str) -> Call:
        """
        Raises:
            TypeError: there is no feature extractor.
        """
        extractor = self._processor("feature_extractor", "AutoFeatureExtractor")
        if extractor is None:
            raise self._nothing_for("sounds", "feature extractor", name)
        given = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return self.of_inputs(given, name)

    @cached_property
    def _tokenizer(self) -> Any:
        return self._processor("tokenizer", "AutoTokenizer")

    @property
    def _longest(self) -> int:
        stated = getattr(self._tokenizer, "model_max_length", _LONGEST)
        positions = getattr(getattr(self._model, "config", None), "max_position_embeddings", None) or _LONGEST
        return min(_LONGEST, int(min(stated, _LONGEST)), positions)

    def _processor(self, attribute: str, auto_class: str) -> Any:
        """That of the target; else the one in the folder, or the cache, that the model was loaded from. Nothing is downloaded."""
        held = getattr(self._target, attribute, None)
        source = getattr(getattr(self._model, "config", None), "_name_or_path", "")
        if held is not None or not source:
            return held
        import transformers

        try:
            return getattr(transformers, auto_class).from_pretrained(source, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # the model has none of this kind, or not here

    def _nothing_for(self, kind: str, tool: str, name: str) -> TypeError:
        return TypeError(
            f"{name}: {kind} need a {tool}, and there is none in a {type(self._target).__name__}, nor where it was loaded from: "
            "pass dicts of its inputs, or accelerate the pipeline"
        )
