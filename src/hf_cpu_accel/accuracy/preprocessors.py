"""Convert texts, images and audio to inputs of a model, with the preprocessors of the pipeline or those next to the weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hf_cpu_accel.accuracy.calls import Call, named_call

_LONGEST = 512  # tokens


class Preprocessors:
    """The preprocessors of a target with one model.

    Args:
        target: the target.
        model: the model of the target, or the target itself.
    """

    def __init__(self, target: Any, model: nn.Module) -> None:
        self._target, self._model = target, model
        # A SentenceTransformer has one mapping as its input, and a method that creates it.
        self._preprocess = getattr(model, "preprocess", None) or getattr(model, "tokenize", None)

    @property
    def takes_texts(self) -> bool:
        """Return whether texts can be converted."""
        return self._preprocess is not None or self._tokenizer is not None

    def of_text(self, text: Any, name: str) -> Call:
        """Return the call for a text or a pair of texts.

        Raises:
            TypeError: the target has no tokenizer.
        """
        if self._preprocess is not None:
            return Call((self._preprocess([text]),), {}, name)
        if self._tokenizer is None:
            raise self._missing("texts", "tokenizer", name)
        texts = (text,) if isinstance(text, str) else text  # or a pair
        tokens = self._tokenizer(*texts, return_tensors="pt", truncation=True, max_length=self._longest)
        inputs = {key: value for key, value in tokens.items() if isinstance(value, Tensor)}
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]
        return self.of_inputs(inputs, name)

    def of_inputs(self, inputs: Mapping[str, Any], name: str) -> Call:
        """Return the call for a dict of inputs.

        Raises:
            TypeError: an empty dict, or keys that are not strings.
        """
        if not inputs or not all(isinstance(key, str) for key in inputs):
            raise TypeError(f"{name} is a dict with the keys {list(inputs)}: expected names of inputs")
        if self._preprocess is not None:
            return Call((dict(inputs),), {}, name)
        return named_call(self._model, inputs, name)

    def of_image(self, image: Any, name: str) -> Call:
        """Return the call for an image.

        Raises:
            TypeError: the target has no image processor.
        """
        processor = self._processor("image_processor", "AutoImageProcessor")
        if processor is None:
            raise self._missing("images", "image processor", name)
        return self.of_inputs(processor(images=image, return_tensors="pt"), name)

    def of_audio(self, audio: Any, name: str) -> Call:
        """Return the call for audio, an array of one dimension with the sampling rate of the model.

        Raises:
            TypeError: the target has no feature extractor.
        """
        extractor = self._processor("feature_extractor", "AutoFeatureExtractor")
        if extractor is None:
            raise self._missing("audio inputs", "feature extractor", name)
        inputs = extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return self.of_inputs(inputs, name)

    @cached_property
    def _tokenizer(self) -> Any:
        return self._processor("tokenizer", "AutoTokenizer")

    @property
    def _longest(self) -> int:
        """Return the maximum number of tokens of a text."""
        limit = getattr(self._tokenizer, "model_max_length", _LONGEST)
        positions = getattr(getattr(self._model, "config", None), "max_position_embeddings", None) or _LONGEST
        return min(_LONGEST, int(min(limit, _LONGEST)), positions)

    def _processor(self, attribute: str, auto_class: str) -> Any:
        """Return the preprocessor of the target, or else the one in the folder or cache of the model; None without one.

        Nothing is downloaded.
        """
        preprocessor = getattr(self._target, attribute, None)
        source = getattr(getattr(self._model, "config", None), "_name_or_path", "")
        if preprocessor is not None or not source:
            return preprocessor
        import transformers

        try:
            return getattr(transformers, auto_class).from_pretrained(source, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # the model has none, or it is not on this machine

    def _missing(self, kind: str, tool: str, name: str) -> TypeError:
        return TypeError(
            f"{name}: {kind} need a {tool}, but {type(self._target).__name__} has none, and there is none next to its weights: "
            "pass dicts of inputs, or accelerate the pipeline"
        )
