"""The decoder of a VAE as a model of its own, to save, load and call like any other."""

from __future__ import annotations

from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor


class VaeDecoder(AutoencoderKL):
    """An autoencoder whose forward pass is `decode`; in a rival's environment, too."""

    def forward(self, latents: Tensor) -> DecoderOutput:  # type: ignore[override]
        """Latents [batch, 4, height / 8, width / 8] -> images [batch, 3, height, width] as `.sample`."""
        return self.decode(latents)
