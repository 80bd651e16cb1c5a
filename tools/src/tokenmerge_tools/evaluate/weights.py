"""A key of a model's weights, because they can change under the same name."""

from __future__ import annotations

from pathlib import Path

from tokenmerge_tools.pipelines.loading import ModelSource, SourceKind
from tokenmerge_tools.records.kinds import key_of

_FILES = (".safetensors", ".bin", ".json", ".txt")


def weights_key(source: ModelSource) -> str | None:
    """Make a key from the sizes and modification times of a model's files, or from the commit of a hub model.

    The configs of a hub model must have been read before.

    Returns:
        The key; None for a bundled model, whose weights belong to the version of this package.
    """
    if source.kind is SourceKind.DEMO:
        return None
    if source.kind is SourceKind.HUB:
        from huggingface_hub import try_to_load_from_cache

        # …/snapshots/COMMIT/model_index.json
        index = try_to_load_from_cache(source.location, "model_index.json")
        return Path(index).parent.name if isinstance(index, str) else None
    place = Path(source.location)
    files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.suffix in _FILES)
    found = {f.relative_to(place).as_posix(): (f.stat().st_size, f.stat().st_mtime_ns) for f in files}
    return key_of(found)
