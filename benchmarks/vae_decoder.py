"""The half of a VAE that makes images, as a model that the library saves, loads, and calls like any other."""

from __future__ import annotations

from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor


class VaeDecoder(AutoencoderKL):
    """An autoencoder whose forward pass is `decode`; in a rival's environment, too."""

    def forward(self, latents: Tensor) -> DecoderOutput:  # type: ignore[override]
        """Latents [batch, 4, height / 8, width / 8] -> images [batch, 3, height, width] as `.sample`."""
        return self.decode(latents)
