"""The tables of the classes `CPUModelFor<Task>` and `CPU...Pipeline`.

The tables are plain data, so that `hf_cpu_accel.__getattr__` knows the names of the classes without importing transformers,
optimum or diffusers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task: `CPUModelFor<name>` wraps the models that `transformers.<auto_class>` loads.

    Attributes:
        name: the task in the name of the class, for example "SequenceClassification".
        auto_class: name of the transformers auto class that loads the model.
        outputs: outputs of the forward pass, for the docstring of the class.
        pipelines: the tasks of `transformers.pipeline` that accept the class.
        pipeline_models: name of the table in `transformers.models.auto.modeling_auto` with the model classes that these pipelines
            accept; None if they check no table.
        aliases: further names of the class without the prefix, which another backend of optimum uses.
    """

    name: str
    auto_class: str
    outputs: str
    pipelines: tuple[str, ...] = ()
    pipeline_models: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def class_name(self) -> str:
        """Return the name of the class."""
        return f"CPUModelFor{self.name}"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the name of the class and its aliases."""
        return (self.class_name, *(f"CPUModelFor{alias}" for alias in self.aliases))


_LOGITS = "`logits` [batch, labels]"
_WORDS = (
    "`logits` [batch, sequence, vocabulary] and the KV cache; `generate` returns token ids [batch, sequence]"
)

_TEXT = (
    Task(
        "FeatureExtraction",
        "AutoModel",
        "`last_hidden_state` [batch, sequence, hidden], and `pooler_output` for models with a pooler",
        ("feature-extraction", "image-feature-extraction", "zero-shot-audio-classification"),
    ),
    Task(
        "SequenceClassification",
        "AutoModelForSequenceClassification",
        _LOGITS,
        ("text-classification", "zero-shot-classification"),
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task(
        "TokenClassification",
        "AutoModelForTokenClassification",
        "`logits` [batch, sequence, labels]",
        ("token-classification",),
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task(
        "QuestionAnswering",
        "AutoModelForQuestionAnswering",
        "`start_logits` and `end_logits` [batch, sequence]",
    ),
    Task("MaskedLM", "AutoModelForMaskedLM", "`logits` [batch, sequence, vocabulary]", ("fill-mask",)),
    Task("MultipleChoice", "AutoModelForMultipleChoice", "`logits` [batch, choices]"),
    Task("NextSentencePrediction", "AutoModelForNextSentencePrediction", "`logits` [batch, 2]"),
    Task(
        "CausalLM",
        "AutoModelForCausalLM",
        _WORDS,
        ("text-generation", "decision"),
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    ),
    Task(
        "Seq2SeqLM",
        "AutoModelForSeq2SeqLM",
        _WORDS,
        (),
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    ),
    Task(
        "TableQuestionAnswering",
        "AutoModelForTableQuestionAnswering",
        "`logits` [batch, sequence], and `logits_aggregation` [batch, aggregations] for models with aggregation",
        ("table-question-answering",),
        "MODEL_FOR_TABLE_QUESTION_ANSWERING_MAPPING_NAMES",
    ),
)

_IMAGES = (
    Task(
        "ImageClassification",
        "AutoModelForImageClassification",
        _LOGITS,
        ("image-classification",),
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task(
        "ObjectDetection",
        "AutoModelForObjectDetection",
        "`logits` [batch, queries, labels + 1] and `pred_boxes` [batch, queries, 4]",
        ("object-detection",),
        "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    ),
    Task(
        "SemanticSegmentation",
        "AutoModelForSemanticSegmentation",
        "`logits` [batch, labels, height, width]",
        ("image-segmentation",),
        "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    ),
    Task(
        "UniversalSegmentation",
        "AutoModelForUniversalSegmentation",
        "`class_queries_logits` [batch, queries, labels + 1] and `masks_queries_logits` [batch, queries, height, width]",
        ("image-segmentation",),
        "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
        ("ImageSegmentation",),
    ),
    Task(
        "InstanceSegmentation",
        "AutoModelForInstanceSegmentation",
        "a score per label and a mask per query, with the names of the model",
        ("image-segmentation",),
        "MODEL_FOR_INSTANCE_SEGMENTATION_MAPPING_NAMES",
    ),
    Task(
        "KeypointMatching",
        "AutoModelForKeypointMatching",
        "`matches` and `matching_scores` [batch, 2, keypoints]",
        ("keypoint-matching",),
    ),
    Task(
        "DepthEstimation",
        "AutoModelForDepthEstimation",
        "`predicted_depth` [batch, height, width]",
        ("depth-estimation",),
        "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    ),
    Task("ImageToImage", "AutoModelForImageToImage", "`reconstruction` [batch, channels, height, width]"),
    Task(
        "MaskGeneration",
        "AutoModelForMaskGeneration",
        "`pred_masks` [batch, points, masks, height, width] and `iou_scores` [batch, points, masks]",
        ("mask-generation",),
        "MODEL_FOR_MASK_GENERATION_MAPPING_NAMES",
    ),
    Task(
        "VideoClassification",
        "AutoModelForVideoClassification",
        _LOGITS,
        ("video-classification",),
        "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    ),
)

_SOUND = (
    Task(
        "AudioClassification",
        "AutoModelForAudioClassification",
        _LOGITS,
        ("audio-classification",),
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task(
        "AudioFrameClassification",
        "AutoModelForAudioFrameClassification",
        "`logits` [batch, frames, labels]",
    ),
    Task(
        "AudioXVector",
        "AutoModelForAudioXVector",
        "`embeddings` [batch, features] of the speaker, and `logits` [batch, labels]",
    ),
    Task(
        "CTC",
        "AutoModelForCTC",
        "`logits` [batch, frames, vocabulary]",
        ("automatic-speech-recognition",),
    ),
    Task(
        "SpeechSeq2Seq",
        "AutoModelForSpeechSeq2Seq",
        _WORDS,
        ("automatic-speech-recognition",),
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ),
    Task("TextToWaveform", "AutoModelForTextToWaveform", "`waveform` [batch, samples]", ("text-to-audio",)),
    Task(
        "TextToSpectrogram",
        "AutoModelForTextToSpectrogram",
        "`spectrogram` [batch, frames, mels]",
        ("text-to-audio",),
        None,
        ("TextToSpeechSeq2Seq",),
    ),
)

_SEVERAL = (
    Task(
        "ZeroShotImageClassification",
        "AutoModelForZeroShotImageClassification",
        "`logits_per_image` [images, texts] and `logits_per_text` [texts, images]",
        ("zero-shot-image-classification",),
        "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task(
        "ZeroShotObjectDetection",
        "AutoModelForZeroShotObjectDetection",
        "`logits` [batch, patches, texts] and `pred_boxes` [batch, patches, 4]",
        ("zero-shot-object-detection",),
        "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES",
    ),
    Task(
        "ImageTextToText",
        "AutoModelForImageTextToText",
        _WORDS,
        ("image-text-to-text",),
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        ("VisualCausalLM", "Vision2Seq"),
    ),
    Task(
        "MultimodalLM",
        "AutoModelForMultimodalLM",
        _WORDS,
        ("any-to-any",),
        "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    ),
    Task(
        "DocumentQuestionAnswering",
        "AutoModelForDocumentQuestionAnswering",
        "`start_logits` and `end_logits` [batch, sequence]",
        ("document-question-answering",),
        "MODEL_FOR_DOCUMENT_QUESTION_ANSWERING_MAPPING_NAMES",
    ),
    Task("VisualQuestionAnswering", "AutoModelForVisualQuestionAnswering", "`logits` [batch, answers]"),
)

TASKS: tuple[Task, ...] = (*_TEXT, *_IMAGES, *_SOUND, *_SEVERAL)

CLASS_NAMES: tuple[str, ...] = ("CPUModel", *(name for task in TASKS for name in task.class_names))
"""The names of the classes in `hf_cpu_accel.frontends.optimum`."""

DIFFUSION: dict[str, str] = {
    "CPUDiffusionPipeline": "DiffusionPipeline",
    "CPUPipelineForText2Image": "AutoPipelineForText2Image",
    "CPUPipelineForImage2Image": "AutoPipelineForImage2Image",
    "CPUPipelineForInpainting": "AutoPipelineForInpainting",
}
"""{name of a class in `hf_cpu_accel.frontends.diffusion_pipelines`: class of diffusers that loads it}."""
