"""Pictures of tested clips: blurred, restored and sharp frames side by side, as PNG files and as a film."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from shared.program import user_error

Picture = NDArray[np.uint8]
RATE = 10  # frames per second of a film: slow enough to look at
THUMBNAIL = 1536  # pixels that a picture for a board is wide at most


def strip(frames: Mapping[str, Picture]) -> Picture:
    """Put pictures of one size, (height, width, 3), side by side, each with its label."""
    return np.concatenate([_labelled(frame, label) for label, frame in frames.items()], 1)


def thumbnail(picture: Picture) -> Picture:
    image = Image.fromarray(picture)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return np.asarray(image)


def save(path: Path, picture: Picture) -> None:
    with user_error(f"cannot write pictures to {path.parent}", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)


def save_film(path: Path, pictures: Iterable[Picture]) -> None:
    """Write pictures of one size, even in height and width, as a film that browsers play."""
    import av

    with user_error(f"cannot write {path}", OSError), av.open(str(path), "w") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream = container.add_stream(codec, RATE)
        stream.pix_fmt = "yuv420p"
        for number, picture in enumerate(pictures):
            if number == 0:
                stream.height, stream.width, _ = picture.shape
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def _labelled(frame: Picture, label: str) -> Picture:
    height = max(10, frame.shape[0] // 24)
    image = Image.fromarray(frame)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(height)
    place = (height // 2, height // 4)
    draw.rectangle(draw.textbbox(place, label, font), fill="black")
    draw.text(place, label, "white", font)
    return np.asarray(image)
