"""Which tokens a ViT has and which of them its head reads: the one place where tokens have numbers.

Prefix tokens come first (class, distillation, registers), then the patches, row by row. A propagation over tokens is a
matrix M [N,N] whose row i says where token i has its content from; a map is the row that the head reads, over patches:

    head                             row
    class token                      M[0]
    class and distillation token     (M[0] + M[1]) / 2
    mean of patches                  mean of M[i] over patches i
    mean of all                      mean of M[i] over all tokens i
    attention pool                   sum_i a_i M[i]        a: the pool's own attention, mean of its heads

Registers never reach the head by themselves: they are columns that propagation passes through, and no map shows them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

CLASS, BOTH, PATCHES, ALL, POOL = (
    "class token",
    "class and distillation token",
    "mean of patches",
    "mean of all",
    "attention pool",
)
LEADING = {CLASS: 1, BOTH: 2}  # heads that read so many of the first tokens and nothing else


@dataclass(frozen=True)
class Layout:
    """How many tokens of which kind, and what the head reads of them.

    Attributes:
        prefix: Tokens before the patches: class, distillation, registers.
        patches: Patches, P; with the prefix there are N tokens.
        head: What the head reads, one of the module's table. Defaults to "class token".
        weights: How much an attention pool reads of each token [B,N]; it depends on the image. Defaults to None.
    """

    prefix: int
    patches: int
    head: str = CLASS
    weights: Tensor | None = None  # [B,N] of an attention pool: how much it reads of each token

    @property
    def leading(self) -> int:
        """How many of the first tokens are all that the head reads; 0 where it reads patches."""
        return LEADING.get(self.head, 0)

    def patches_of(self, values: Tensor, dim: int = -1) -> Tensor:
        """The patches' part of something that every token has. They are the last tokens.

        Args:
            values: Values [...,N,...].
            dim: The dimension of the tokens. Defaults to -1.

        Returns:
            Values [...,P,...]: a view.
        """
        return values.narrow(dim, values.shape[dim] - self.patches, self.patches)

    def with_prefix(self, values: Tensor, fill: float) -> Tensor:
        """Extend values of patches to all tokens.

        Args:
            values: Values of patches [B,P].
            fill: The value of every prefix token.

        Returns:
            Values of all tokens [B,N].
        """
        return pad(values, (self.prefix, 0), value=fill)

    def needed(self, tokens: Tensor) -> Tensor:
        """The tokens without which the head cannot be computed.

        Args:
            tokens: All tokens [...,N,D].

        Returns:
            Those that are needed [...,R,D]: a view.
        """
        return tokens[..., : self.leading, :] if self.leading else tokens

    def rows_of(self, matrix: Tensor) -> Tensor:
        """The rows of a matrix over tokens that the head reads.

        Args:
            matrix: A matrix [...,N,M].

        Returns:
            The rows [...,R,M]: a view.
        """
        return self.needed(matrix) if self.head != PATCHES else self.patches_of(matrix, -2)

    def mean_of(self, rows: Tensor) -> Tensor:
        """The mean of the rows that the head reads, weighted as the head does.

        Args:
            rows: The rows [B,...,R,M], from `rows_of`.

        Returns:
            Their mean [B,...,1,M].
        """
        if self.head != POOL:
            return rows.mean(-2, keepdim=True)
        assert self.weights is not None, "the pool's attention depends on the image: take the layout from a trace"
        between = (1,) * (rows.ndim - 3)
        return self.weights.view(len(rows), *between, 1, -1).to(rows) @ rows

    def row_of(self, matrix: Tensor) -> Tensor:
        """The one row that the head reads of a matrix over tokens.

        Args:
            matrix: A matrix [B,...,N,M].

        Returns:
            The row [B,...,1,M].
        """
        return self.mean_of(self.rows_of(matrix))

    def map_of(self, matrix: Tensor) -> Tensor:
        """The row that the head reads, over patches.

        Args:
            matrix: A matrix [B,...,N,N].

        Returns:
            The map [B,...,P].
        """
        return self.patches_of(self.row_of(matrix).squeeze(-2))

    def own(self, matrix: Tensor) -> Tensor:
        """The attention to themselves of the tokens that are all the head reads.

        Args:
            matrix: Attention [B,N,N].

        Returns:
            Its entries [B,leading]: a view.
        """
        return matrix.diagonal(dim1=-2, dim2=-1)[..., : self.leading]

    def split(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Split a row into the head's own tokens and all others.

        Args:
            row: A row [B,N].

        Returns:
            The parts [B,leading] and [B,N-leading].
        """
        return row[:, : self.leading], row[:, self.leading :]


def layout_of(model: Any) -> Layout:
    """The layout of a model that `families.refusal` accepts.

    Args:
        model: The timm model.

    Returns:
        Its layout.
    """
    return Layout(model.num_prefix_tokens, model.patch_embed.num_patches, head_of(model) or "")


def head_of(model: Any) -> str | None:
    """How the model's head reads its tokens.

    Args:
        model: The timm model.

    Returns:
        A head of the module's table, or None where it reads no row of tokens, such as a maximum.
    """
    pool = getattr(model, "attn_pool", None)
    if pool is not None:
        return POOL if getattr(pool, "latent_len", 0) == 1 and pool.pos_embed is None else None
    if isinstance(getattr(model, "head_dist", None), nn.Linear):
        return BOTH
    if model.global_pool == "token":
        return CLASS if model.cls_token is not None else None
    if model.global_pool == "avg":
        return ALL if getattr(model, "pool_include_prefix", False) and model.num_prefix_tokens else PATCHES
    return None


def read(model: Any, layout: Layout, tokens: Tensor) -> Tensor:
    """Logits that the model's head reads from tokens.

    Args:
        model: The timm model.
        layout: Its layout.
        tokens: Tokens [B,N,D] as they leave a block, or those that the head needs.

    Returns:
        Logits [B,C].
    """
    return model.forward_head(model.norm(layout.needed(tokens)))


def read_one(model: Any, layout: Layout, token: Tensor) -> Tensor:
    """Logits that the head would read if there were one token only.

    Args:
        model: The timm model.
        layout: Its layout.
        token: The token [B,D] as it leaves a block.

    Returns:
        Logits [B,C].
    """
    normed = model.norm(token)
    if layout.head == BOTH:
        return model.forward_head(normed[:, None].expand(-1, 2, -1))
    if layout.head == POOL:
        normed = model.attn_pool(normed[:, None])
    return model.head(model.head_drop(model.fc_norm(normed)))


@torch.no_grad()
def for_images(model: Any, layout: Layout, tokens: Tensor) -> Layout:
    """The layout with what depends on the image: an attention pool's weights.

    Args:
        model: The timm model.
        layout: Its layout.
        tokens: Tokens [B,N,D] as they leave the last block.

    Returns:
        The layout, with `weights` [B,N] where the head is a pool.
    """
    if layout.head != POOL:
        return layout
    pool, normed = model.attn_pool, model.norm(tokens)
    everything = getattr(model, "pool_include_prefix", True)  # timm's Eva has no such option and pools all
    seen = normed if everything else layout.patches_of(normed, 1)
    query = pool.q_norm(pool.q(pool.latent).unflatten(2, (pool.num_heads, -1)).transpose(1, 2))
    key = pool.k_norm(pool.kv(seen).unflatten(2, (2, pool.num_heads, -1)).permute(2, 0, 3, 1, 4)[0])
    attention = (query @ key.transpose(-2, -1) * pool.scale).softmax(-1).mean(1)[:, 0]
    return replace(layout, weights=attention if everything else layout.with_prefix(attention, 0))
