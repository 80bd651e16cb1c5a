"""Models in which tokens cannot be merged yet, with the reasons: an error is better than a wrong image."""

_PACKED = "text, images and sound are packed into one sequence without a token grid or a batch axis"
_KEPT = "it caches keys and values between calls, and merging would change their tokens"
_SCALES = "the sequence holds earlier frames at several scales, which no single token grid describes"
_MASKED = "a mask divides the sequence into segments, and merging would change their lengths"
_EXPERTS = "how many tokens an expert takes depends on the number of tokens"
_LINE = "its tokens are a sequence in time, without the rows and columns that merging needs"
_TAKES_IMAGES = "its attention takes an image [b, c, h, w] instead of tokens"
_UNKNOWN = "its blocks have not been described yet"

REASONS = {  # by the class of a model or pipeline
    "AceStepTransformer1DModel": _LINE,
    "AnyFlowFARTransformer3DModel": _KEPT,
    "AnyFlowTransformer3DModel": _UNKNOWN,
    "BriaFibo2Transformer2DModel": _UNKNOWN,
    "Cosmos3OmniTransformer": _PACKED,
    "Flux2KleinKVPipeline": "it caches keys and values of reference images between steps, and merging "
    "would change their tokens; Flux2KleinPipeline draws without that cache, and merges",
    "Flux3Transformer2DModel": _UNKNOWN,
    "GlmImageTransformer2DModel": _KEPT,
    "HeliosTransformer3DModel": _SCALES,
    "HunyuanVideoFramepackTransformer3DModel": _SCALES,
    "Kandinsky6SRTransformer3DModel": _PACKED,
    "Kandinsky6Transformer3DModel": _PACKED,
    "Kandinsky3UNet": _TAKES_IMAGES,
    "LongCatAudioDiTTransformer": _LINE,
    "MiniMaxH3Transformer3DModel": _PACKED,
    "MiniMaxMusic3Transformer1DModel": _LINE,
    "MotifVideoTransformer3DModel": _UNKNOWN,
    "NucleusMoEImageTransformer2DModel": _EXPERTS,
    "OmniGenTransformer2DModel": _MASKED,
    "PriorTransformer": "its tokens are those of a text and of one embedding, without rows and columns",
    "RFD4ProteinaTransformer": "its tokens are the residues of a protein, without a token grid",
    "SanaWMLTX2RefinerTransformer3DModel": _KEPT,
    "SanaWMTransformer3DModel": "its attention follows the frames in their order and convolves keys along "
    "them, and its MLP convolves the token grid",
    "StableAudio3DiTModel": _LINE,
    "StableAudioDiTModel": _LINE,
    "StableCascadeUNet": _TAKES_IMAGES,
    "T5FilmDecoder": _LINE,
    "UNet1DModel": _LINE,
    "UNet2DModel": _TAKES_IMAGES,
    "UNetFlatConditionModel": _UNKNOWN,
    "WanAnimate2Transformer3DModel": _KEPT,
    "WuerstchenDiffNeXt": _TAKES_IMAGES,
    "WuerstchenPrior": _TAKES_IMAGES,
    "ZImageOmniPipeline": "each of its samples is a list of images of several sizes",
    "ZImageControlNetModel": "it runs blocks of the transformer that it controls, on other grids",
}
