"""A digest for what stands behind placeholder tokens: the content, with all that decides what it means.

Raw bytes alone are not enough: the same bytes are another picture in another shape, another mode or under
another palette. The digest is the SHA-256 of

::

    "pagedkv.media.v1" ‖ (u64le(len(field)) ‖ field)*

where the first field names the kind, so no two kinds and no two lists of fields can meet.

=====  ============================================================================================
kind   other fields
=====  ============================================================================================
array  dtype as numpy writes it, little-endian · shape, i64le each · elements, little-endian, C order
image  mode · width and height, i64le each · palette's mode and bytes · transparency · orientation · pixels
bytes  the bytes
=====  ============================================================================================
"""

from __future__ import annotations

import struct
import sys
from hashlib import sha256
from typing import Any

import numpy as np

from pagedkv.checks import show
from pagedkv.errors import UsageError

_ORIENTATION = 0x0112  # the tag of EXIF that turns or mirrors an image when it is shown


def media_digest(content: Any) -> bytes:
    """Return 32 bytes that tell a picture, a sound, a tensor or a file from any other; for `Media.digest`.

    What else the model's processor depends on, such as the resolution that it is asked for, is not known
    here: digest the processor's result rather than its input, or mix it in.

    Parameters
    ----------
    content : array, PIL image or bytes
        An array, or what numpy can read as one, counts with its dtype and shape and whatever its strides; an
        image with its mode, size, palette, transparency and orientation; bytes, such as an encoded file, as
        they are. The three never share a digest, even for what looks the same.

    Raises
    ------
    UsageError
        For anything else: text, objects, an image of several frames.
    """
    pil_image = sys.modules.get("PIL.Image")  # who has an image has imported it
    if pil_image is not None and isinstance(content, pil_image.Image):
        return _digest(b"image", *_image_fields(content))
    if isinstance(content, bytes | bytearray):
        return _digest(b"bytes", content)
    if not hasattr(content, "__array__"):
        raise UsageError(f"content: expected an array, a PIL image or bytes, got {show(content)}")
    try:
        array = np.asarray(content)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{type(content).__name__} ({error})"
        raise UsageError(f"content: expected an array that numpy can read, got {got}") from error
    if array.dtype.kind not in "biufc":
        raise UsageError(f"content: expected an array of numbers, got dtype {array.dtype}")
    dtype = array.dtype.newbyteorder("<")
    # Not ascontiguousarray, which makes one dimension of none.
    elements = array.astype(dtype, order="C", copy=False).tobytes()
    return _digest(b"array", dtype.str.encode(), struct.pack(f"<{array.ndim}q", *array.shape), elements)


def _image_fields(image: Any) -> list[bytes]:
    if getattr(image, "n_frames", 1) > 1:
        got = f"{image.n_frames}; digest the file's bytes, or the frames as one array"
        raise UsageError(f"content: expected an image of one frame, got {got}")
    image.load()  # before the palette is looked at: of a file it is only then there
    palette = b"" if image.palette is None else image.palette.mode.encode() + b":" + image.palette.tobytes()
    transparency = image.info.get("transparency")
    return [
        image.mode.encode(),
        struct.pack("<2q", *image.size),
        palette,
        b"" if transparency is None else repr(transparency).encode(),
        str(image.getexif().get(_ORIENTATION, 1)).encode(),
        image.tobytes(),
    ]


def _digest(*fields: bytes | bytearray) -> bytes:
    digest = sha256(b"pagedkv.media.v1")
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()
