"""What a picture is: bytes that elsewhere were hashed without their shape, mode, palette or transparency."""

from __future__ import annotations

import io
import random
from hashlib import sha256
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from pool_driving import num_block_tokens, remember

from pagedkv import BlockPool, Media, UsageError, media_digest

PIXELS = bytes(range(48))


def test_the_same_bytes_in_another_shape_are_another_picture() -> None:
    """A wide and a tall picture of the same bytes were one to the cache (vLLM)."""
    wide, tall = np.zeros((30, 150, 3), np.uint8), np.zeros((150, 30, 3), np.uint8)
    assert media_digest(wide) != media_digest(tall)
    assert media_digest(wide) == media_digest(np.zeros((30, 150, 3), np.uint8))
    shapes: list[tuple[int, ...]] = [(48,), (48, 1), (1, 48), (6, 8), (8, 6), (2, 4, 6), (1, 48, 1)]
    assert len({media_digest(np.frombuffer(PIXELS, np.uint8).reshape(shape)) for shape in shapes}) == 7
    assert len({media_digest(np.zeros(shape)) for shape in [(), (0,), (1,), (0, 1), (1, 0)]}) == 5


def test_the_same_bytes_of_another_dtype_are_another_picture() -> None:
    dtypes = ["u1", "i1", "?", "<u2", "<i2", "<f2", "<f4", "<f8", "<c8"]
    zeros = bytes(48)
    assert len({media_digest(np.frombuffer(zeros, dtype)) for dtype in dtypes}) == len(dtypes)


def test_strides_and_the_order_of_bytes_do_not_matter() -> None:
    """A view was hashed by what lay in memory rather than by what it showed (SGLang)."""
    array = np.arange(600, dtype=np.int32).reshape(10, 20, 3)
    for view in (
        array[::2, 1::3],
        array.transpose(2, 0, 1),
        array[::-1],
        np.asfortranarray(array),
        array[3:4],
    ):
        assert media_digest(view) == media_digest(np.ascontiguousarray(view).copy())
        assert media_digest(view) == media_digest(view.astype(">i4"))
        assert (media_digest(view) == media_digest(array)) == np.array_equal(view, array)


def test_kinds_do_not_meet() -> None:
    array = np.frombuffer(PIXELS, np.uint8)
    assert media_digest(PIXELS) != media_digest(array)
    assert media_digest(PIXELS) == media_digest(bytearray(PIXELS))
    assert media_digest(PIXELS) != sha256(PIXELS).digest()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3), st.lists(st.integers(0, 3), min_size=1, max_size=3)
)
def test_arrays_share_a_digest_exactly_when_they_are_equal(one: list[int], other: list[int]) -> None:
    a, b = np.zeros(one, np.uint8), np.zeros(other, np.uint8)
    assert (media_digest(a) == media_digest(b)) == (one == other)


def test_images_are_told_apart_by_mode_palette_transparency_and_orientation() -> None:
    image_module = pytest.importorskip("PIL.Image")
    gray, rgb = image_module.frombytes("L", (6, 8), PIXELS), image_module.frombytes("RGB", (4, 4), PIXELS)
    turned = image_module.frombytes("L", (8, 6), PIXELS)

    def indexed(palette: list[int], transparency: Any = None) -> Any:
        image = image_module.frombytes("P", (6, 8), bytes(i % 2 for i in range(48)))
        image.putpalette(palette)
        if transparency is not None:
            image.info["transparency"] = transparency
        return image

    red_green, green_red = [255, 0, 0, 0, 255, 0], [0, 255, 0, 255, 0, 0]
    shown_upright = gray.copy()
    shown_upright.getexif()[0x0112] = 6
    images = [gray, rgb, turned, shown_upright, indexed(red_green), indexed(green_red)]
    images += [indexed(red_green, 0), indexed(red_green, 1), indexed(red_green, b"\0\x80")]
    digests = [media_digest(image) for image in images]
    assert len(set(digests)) == len(images)
    assert [media_digest(image.copy()) for image in images if image is not shown_upright] == [
        digest for i, digest in enumerate(digests) if images[i] is not shown_upright
    ]
    assert media_digest(np.asarray(gray)) not in digests


def test_an_image_read_from_a_file_is_the_one_that_was_written() -> None:
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.frombytes("P", (6, 8), bytes(i % 2 for i in range(48)))
    image.putpalette([255, 0, 0, 0, 255, 0])
    digests = []
    for _ in range(2):
        file = io.BytesIO()
        image.save(file, "PNG")
        file.seek(0)
        image = image_module.open(file)
        digests.append(media_digest(image))
    assert digests[0] == digests[1]


def test_an_image_of_several_frames_is_refused() -> None:
    image_module = pytest.importorskip("PIL.Image")
    frames = [image_module.frombytes("L", (6, 8), bytes([i]) * 48) for i in range(3)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(UsageError, match="content: expected an image of one frame, got 3"):
        media_digest(image_module.open(file))
    assert len(media_digest(file.getvalue())) == 32


@pytest.mark.parametrize(
    "content",
    [None, "picture", 7, [1, 2], {"a": 1}, np.array([None]), np.array(["a"]), np.array(["2020"], "M8[D]")],
)
def test_what_is_no_content_is_refused(content: Any) -> None:
    with pytest.raises(UsageError, match=r"content: expected .+, got .+"):
        media_digest(content)


def test_a_pool_serves_each_picture_its_own_blocks() -> None:
    pool, prompt = BlockPool(16), [7] * 48
    wide, tall = (Media(4, 40, media_digest(np.zeros(s, np.uint8))) for s in ((30, 150, 3), (150, 30, 3)))
    remember(pool, prompt, extras=[wide])
    assert num_block_tokens(pool, prompt, extras=[tall]) == 0
    assert num_block_tokens(pool, prompt, extras=[wide]) == 48


def test_a_thousand_pictures_have_a_thousand_digests() -> None:
    rng = random.Random(7)
    assert len({media_digest(rng.randbytes(64)) for _ in range(1000)}) == 1000
