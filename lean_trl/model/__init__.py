"""Models: one table of families over one decoder, and HF checkpoints in and out."""

from lean_trl.model.config import ModelConfig
from lean_trl.model.decoder import CausalLM
from lean_trl.model.families import FAMILIES, Family
from lean_trl.model.loader import load_model, new_model, save_model

__all__ = ["FAMILIES", "CausalLM", "Family", "ModelConfig", "load_model", "new_model", "save_model"]
