"""The heavy operations of a decoder: one interface each, backends behind it, and a plain twin."""

from lean_trl.ops.attention import varlen_attention as varlen_attention
from lean_trl.ops.linear_logprobs import linear_logprobs as linear_logprobs
