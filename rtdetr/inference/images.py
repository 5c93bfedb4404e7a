"""Images of all accepted types (PIL, arrays, tensors), and batches of them for the network.

Letters: B images, H, W their height and width, h, w those of the network's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from rtdetr.config import ConfigError, Resize
from rtdetr.data.classes import DataError
from rtdetr.data.images import Jpeg
from rtdetr.data.preprocess import resize_planes_there
from rtdetr.data.resize import as_rgb_array, resize
from rtdetr.wording import first_line

Pixels = NDArray[np.uint8]  # (H, W, 3) RGB
AnyImage = Image.Image | Pixels | Tensor  # a tensor: (3, H, W) uint8 RGB, on any device


def size_of(image: AnyImage) -> tuple[int, int]:
    """(height, width)"""
    if isinstance(image, Tensor):
        return image.shape[1], image.shape[2]
    if isinstance(image, Image.Image):
        return image.height, image.width
    return image.shape[0], image.shape[1]


def as_pixels(image: AnyImage) -> Pixels:
    if isinstance(image, Tensor):
        return np.ascontiguousarray(image.permute(1, 2, 0).cpu().numpy())
    return as_rgb_array(image)


def as_image(image: AnyImage) -> Image.Image:
    """Converts an image to PIL, RGB; a PIL image is returned as it is."""
    return image if isinstance(image, Image.Image) else Image.fromarray(as_pixels(image))


def pixels_of_array(array: NDArray[Any], bgr: bool = False) -> Pixels:
    """Converts an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), uint8 or floats in [0, 1], to RGB pixels, 8 bits.
    Grey becomes RGB, transparency is dropped. bgr: the channels are in OpenCV's order. Raises DataError."""
    planes = array[..., None] if array.ndim == 2 else array
    if planes.ndim != 3 or planes.shape[2] not in (1, 3, 4) or 0 in planes.shape:
        raise DataError(f"array: expected grey, RGB or RGBA of shape (H, W), (H, W, 3) or (H, W, 4), got {array.shape}")
    if planes.dtype.kind == "f":
        low, high = float(planes.min()), float(planes.max())
        if not 0 <= low <= high <= 1:  # NaN, too
            raise DataError(f"array: expected floats from 0 to 1, not yet normalised, got {low:.3g} to {high:.3g}")
        planes = np.rint(planes * 255).astype(np.uint8)
    if planes.dtype != np.uint8:
        raise DataError(f"array: expected uint8, or floats from 0 to 1, got {planes.dtype}")
    if planes.shape[2] == 1:
        return np.repeat(planes, 3, axis=2)
    return np.ascontiguousarray(planes[..., 2::-1]) if bgr else planes[..., :3]


def crop(image: AnyImage, area: tuple[int, int, int, int]) -> AnyImage:
    """Returns a part of the image; area: xyxy in pixels."""
    x1, y1, x2, y2 = area
    if isinstance(image, Image.Image):
        return image.crop(area)
    return image[:, y1:y2, x1:x2] if isinstance(image, Tensor) else image[y1:y2, x1:x2]


class HostPixels:
    """A batch of images that are resized to the network's size on the host.

    pinned: in memory from which a GPU copies directly.
    """

    def __init__(
        self,
        number: int,
        size: tuple[int, int],
        pinned: bool,
        interpolation: Resize = "cubic",
        pixels: Tensor | None = None,
    ) -> None:
        """pixels: (B, h, w, 3) uint8, if the images are in there already."""
        if pixels is None:
            pixels = torch.empty(number, *size, 3, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.pixels, self.interpolation = pixels, interpolation
        self.sizes = torch.ones(number, 2, dtype=torch.float32, device="cpu", pin_memory=pinned)  # height, width
        self._places, self._sizes = self.pixels.numpy(), self.sizes.numpy()  # views of torch's tensors take 20 us

    def put(self, index: int, image: AnyImage) -> None:
        place = self._places[index]
        self._sizes[index] = size_of(image)
        if isinstance(image, Tensor):
            planes = [np.ascontiguousarray(plane) for plane in image.cpu().numpy()]
            if image.shape[1:] == place.shape[:2]:
                cv2.merge(planes, place)  # several times as fast as NumPy's transposed copy
                return
            image = np.asarray(cv2.merge(planes), np.uint8)
        resize(as_rgb_array(image), (place.shape[0], place.shape[1]), self.interpolation, place)

    def on(self, device: torch.device) -> Tensor:
        """(B, 3, h, w) uint8; places without an image are undefined."""
        return self.pixels.to(device, non_blocking=True).permute(0, 3, 1, 2)


class DevicePixels:
    """A batch of images on the host that are resized to the network's size on the device. JPEG files may be copied as
    stored; torchvision decodes them there with nvJPEG."""

    def __init__(self, number: int, size: tuple[int, int], pinned: bool, interpolation: Resize = "cubic") -> None:
        self.size, self.pinned, self.interpolation = size, pinned, interpolation
        black = torch.zeros(1, 1, 3, dtype=torch.uint8, device="cpu")
        self.images = [black] * number  # pixels (H, W, 3), each of its own size, or bytes of a JPEG (n,)
        self.sizes = torch.ones(number, 2, dtype=torch.float32, device="cpu", pin_memory=pinned)  # height, width

    def put(self, index: int, image: AnyImage | Jpeg) -> None:
        if isinstance(image, Jpeg):
            self.images[index] = torch.tensor(image.content, device="cpu")
            self.sizes[index].numpy()[:] = image.size[::-1]
            return
        pixels = as_pixels(image)
        self.images[index] = torch.empty(pixels.shape, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
        self.images[index].numpy()[:] = pixels
        self.sizes[index].numpy()[:] = pixels.shape[:2]

    def on(self, device: torch.device) -> Tensor:
        """(B, 3, h, w) uint8; places without an image are black."""
        decoded = iter(_decoded([each for each in self.images if each.dim() == 1], device))
        there = [
            next(decoded) if each.dim() == 1 else each.to(device, non_blocking=True).permute(2, 0, 1)
            for each in self.images
        ]
        batch = torch.cat([resize_planes_there(planes[None], self.size, self.interpolation) for planes in there])
        return batch.contiguous(memory_format=torch.channels_last)


def _decoded(stored: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decodes JPEG files on the device: bytes (n,) to planes (3, H, W) uint8. Raises DataError."""
    if not stored:
        return []
    from torchvision.io import ImageReadMode, decode_jpeg  # here, as it takes as long as torch to import

    # The decoder uses its own stream, and does not wait for this one before it writes to this stream's memory.
    torch.cuda.current_stream(device).synchronize()
    try:
        return decode_jpeg(stored, ImageReadMode.RGB, device)
    except RuntimeError as error:
        reason = first_line(error)
        raise DataError(f"decode: {device} cannot decode one of the JPEG files ({reason}); host can") from error


class DeviceTensors:
    """A batch of tensors on the device that are resized to the network's size there."""

    def __init__(
        self, images: Tensor | Sequence[Tensor], size: tuple[int, int], interpolation: Resize = "cubic"
    ) -> None:
        """images: (B, 3, H, W) uint8, or (3, H, W) each."""
        self.images, self.size, self.interpolation = images, size, interpolation
        sizes = [images.shape[2:]] * len(images) if isinstance(images, Tensor) else [each.shape[1:] for each in images]
        self.sizes = torch.from_numpy(np.array(sizes, np.float32))  # (B, 2)

    def on(self, device: torch.device) -> Tensor:
        """(B, 3, h, w) uint8"""
        if isinstance(self.images, Tensor):
            return resize_planes_there(self.images, self.size, self.interpolation)
        return torch.cat([resize_planes_there(each[None], self.size, self.interpolation) for each in self.images])


def check_decoder(device: torch.device) -> None:
    """Raises ConfigError if torchvision cannot decode JPEG files on the device."""
    from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

    try:
        decode_jpeg([encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))], ImageReadMode.RGB, device)
    except RuntimeError as error:
        reason = first_line(error)
        raise ConfigError(f"decode: expected host, as torchvision decodes no JPEG on {device} ({reason})") from error


FileBatch = HostPixels | DevicePixels
Batch = FileBatch | DeviceTensors
