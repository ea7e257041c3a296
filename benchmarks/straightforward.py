"""The straightforward versions: what one would write first, and what the public code of the papers does.

Scores are computed one caption at a time against all images of a shard. The caption is copied once for each image,
every attended vector is built, transposed and made contiguous, and a cosine is taken from full-size temporaries. The
weights are those of our models, so that both sides do the same work; the tests of the chapters say that the values
agree. Written from the descriptions of the public code, for measuring only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from itm_utils.matcher import ImageBatch, Images, PairBatch, TextBatch, Texts
from itm_utils.models.sgraf import SAF, SGR, SGRAF

EPS, SHARD = 1e-8, 128


# ------------------------------------------------------------------------------------------------ scores


def unit(x: Tensor, dim: int) -> Tensor:
    """Divide by the norm plus a small number."""
    return x / (x.pow(2).sum(dim=dim, keepdim=True).sqrt() + EPS)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosine along the last axis."""
    dot = (x * y).sum(dim=-1)
    return dot / (x.norm(dim=-1) * y.norm(dim=-1)).clamp(min=EPS)


def attend(queries: Tensor, context: Tensor, temperature: float, focal: str = "") -> Tensor:
    """Attended vectors (b, q, d): leaky ReLU, norm over the queries, softmax over the context; focal as in BFAN."""
    batch, query_count, context_count = len(queries), queries.shape[1], context.shape[1]
    affinity = torch.bmm(context, queries.transpose(1, 2).contiguous())  # (b, k, q)
    affinity = unit(F.leaky_relu(affinity, 0.1), dim=2)
    affinity = affinity.transpose(1, 2).contiguous().view(batch * query_count, context_count)
    weights = F.softmax(affinity * temperature, dim=1).view(batch, query_count, context_count)
    if focal:
        weights = refocus(weights, focal)
    weights = weights.transpose(1, 2).contiguous()
    return torch.bmm(context.transpose(1, 2).contiguous(), weights).transpose(1, 2).contiguous()


def refocus(weights: Tensor, focal: str) -> Tensor:
    """Drop the keys below the mean weight, or below the weighted one by comparing every pair of keys; renormalise."""
    count = weights.shape[-1]
    if focal == "equal":
        above = count * weights - weights.sum(dim=-1, keepdim=True)
    else:
        above = ((weights[..., :, None] - weights[..., None, :]) * weights.sqrt()[..., None, :]).sum(dim=-1)
    kept = torch.where(above > 0, torch.ones_like(weights), torch.zeros_like(weights)) * weights
    return kept / kept.sum(dim=-1, keepdim=True)


def log_sum_exp(relevance: Tensor, factor: float) -> Tensor:
    return (relevance * factor).exp().sum(dim=1, keepdim=True).log() / factor


def captions_of(texts: Texts) -> list[tuple[int, Tensor]]:
    """Each caption with its real words (w, d)."""
    return [(c, texts.local[c, : int(length)]) for c, length in enumerate(texts.lengths)]


def scan_scores(images: Images, texts: Texts, direction: str, temperature: float, lse: float) -> Tensor:
    """SCAN's scores (i, c) with LogSumExp, caption by caption."""
    columns = []
    for _, words in captions_of(texts):
        repeated = words.repeat(len(images), 1, 1)
        queries, context = (repeated, images.local) if direction == "t2i" else (images.local, repeated)
        attended = attend(queries, context, temperature)
        columns.append(log_sum_exp(cosine(queries, attended), lse))
    return torch.cat(columns, dim=1)


def bfan_scores(images: Images, texts: Texts, temperature: float, focal: str) -> Tensor:
    """BFAN's scores (i, c): both directions, caption by caption."""
    columns = []
    for _, words in captions_of(texts):
        repeated = words.repeat(len(images), 1, 1)
        t2i = cosine(repeated, attend(repeated, images.local, temperature, focal)).mean(dim=1, keepdim=True)
        i2t = cosine(images.local, attend(images.local, repeated, temperature, focal)).mean(dim=1, keepdim=True)
        columns.append(t2i + i2t)
    return torch.cat(columns, dim=1)


def bfan_pair_scores(images: Images, texts: Texts, temperature: float, focal: str) -> Tensor:
    """BFAN's scores (b,) of given pairs, one pair at a time."""
    both = ((images[b : b + 1], texts[b : b + 1]) for b in range(len(images)))
    return torch.cat([bfan_scores(*pair, temperature, focal)[:, 0] for pair in both])


def saf_vector(head: SAF, nodes: Tensor) -> Tensor:
    """SAF of nodes (i, k, s): a sigmoid gate per node behind a batch norm over this caption."""
    gates = head.gate(nodes)
    norm = head.norm
    flat = F.batch_norm(
        gates.flatten(0, 1), norm.running_mean, norm.running_var, norm.weight, norm.bias, head.training, norm.momentum
    )
    gates = flat.view_as(gates).sigmoid()
    gates = gates / (gates.abs().sum(dim=1, keepdim=True) + EPS)
    return unit((gates.transpose(1, 2) @ nodes)[:, 0], dim=-1)


def sgr_vector(head: SGR, nodes: Tensor) -> Tensor:
    """SGR of nodes (i, k, s): every node is updated in every step, the first is read."""
    for step in head.steps:
        query, key = step.q_proj(nodes), step.k_proj(nodes)
        edges = F.softmax(torch.bmm(query, key.transpose(1, 2)), dim=-1)
        nodes = F.relu(step.out_proj(torch.bmm(edges, nodes)))
    return nodes[:, 0]


def sgraf_scores(model: SGRAF, images: Images, texts: Texts) -> Tensor:
    """SGRAF's scores (i, c), caption by caption: every difference and every node is built."""
    similarity, head = model.similarity, model.head
    columns = []
    for caption, words in captions_of(texts):
        repeated = words.repeat(len(images), 1, 1)
        attended = unit(attend(repeated, images.local, similarity.temperature), dim=-1)
        local = unit(similarity.local_proj((attended - repeated).pow(2)), dim=-1)
        whole = unit(similarity.global_proj((images.pooled - texts.pooled[caption]).pow(2)), dim=-1)
        nodes = torch.cat([whole[:, None], local], dim=1)
        vector = saf_vector(head, nodes) if isinstance(head, SAF) else sgr_vector(head, nodes)
        columns.append(torch.sigmoid(model.score_proj(vector)))
    return torch.cat(columns, dim=1)


def in_shards(score: Callable[[Images, Texts], Tensor], images: Images, texts: Texts, shard: int = SHARD) -> Tensor:
    """All pairs, a shard of images with a shard of captions at a time, as the public evaluation does."""
    rows = []
    for i in range(0, len(images), shard):
        parts = [score(images[i : i + shard], texts[c : c + shard]) for c in range(0, len(texts), shard)]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


# ------------------------------------------------------------------------------------------------ encoders


def read_words(gru: nn.GRU, embedding: nn.Embedding, batch: TextBatch, dropout: nn.Module | None = None) -> Tensor:
    """States (c, w, d) of a GRU, directions averaged: embed all positions, pack, run, pad again.

    Sorted by length as the public loader's batches are, and put back into order.
    """
    lengths, order = batch.lengths.sort(descending=True, stable=True)
    embedded = embedding(batch.words[order])
    embedded = embedded if dropout is None else dropout(embedded)
    states, _ = pad_packed_sequence(gru(pack_padded_sequence(embedded, lengths, batch_first=True))[0], batch_first=True)
    if gru.bidirectional:
        half = states.shape[2] // 2
        states = (states[:, :, :half] + states[:, :, half:]) / 2
    return states[order.argsort()]


def last_state(gru: nn.GRU, embedding: nn.Embedding, batch: TextBatch) -> Tensor:
    """L2-normalised state (c, d) after the last word of each caption."""
    states = read_words(gru, embedding, batch)
    places = (batch.lengths - 1).view(-1, 1, 1).expand(-1, 1, states.shape[2])
    last = torch.gather(states, 1, places)[:, 0]
    return last / last.pow(2).sum(dim=1, keepdim=True).sqrt()


def encode_regions_and_words(model: nn.Module, batch: PairBatch) -> tuple[Images, Texts]:
    """Encoders of SCAN and BFAN."""
    regions = unit(model.region_proj(batch.images.regions), dim=-1)
    words = unit(read_words(model.gru, model.word_embedding, batch.texts), dim=-1)
    images = Images(regions, batch.images.mask, lengths=batch.images.lengths)
    return images, Texts(words, batch.texts.mask, lengths=batch.texts.lengths)


def encode_sgraf(model: SGRAF, batch: PairBatch) -> tuple[Images, Texts]:
    """Encoders of SGRAF: the pooled vector of each caption is computed from its own words alone."""
    regions = unit(model.region_proj(batch.images.regions), dim=-1)
    words = unit(read_words(model.gru, model.word_embedding, batch.texts, model.word_dropout), dim=-1)
    pool = model.image_pool
    local, mean = (
        pool.local_norm(pool.local_proj(regions)),
        pool.mean_norm.normalize_rows(pool.mean_proj(regions.mean(dim=1))),
    )
    pooled_images = pool_by_attention(pool, local, mean, regions)
    pool, parts = model.text_pool, []
    for caption, length in enumerate(batch.texts.lengths.tolist()):
        own = words[caption : caption + 1, :length]
        parts.append(pool_by_attention(pool, pool.local_proj(own), pool.mean_proj(own.mean(dim=1)), own))
    images = Images(regions, batch.images.mask, pooled_images, lengths=batch.images.lengths)
    return images, Texts(words, batch.texts.mask, torch.cat(parts), lengths=batch.texts.lengths)


def pool_by_attention(pool: nn.Module, local: Tensor, mean: Tensor, vectors: Tensor) -> Tensor:
    local, mean = pool.dropout(torch.tanh(local)), pool.dropout(torch.tanh(mean))
    mean = mean[:, None].repeat(1, vectors.shape[1], 1)
    weights = F.softmax(pool.logit_proj(local * mean)[..., 0], dim=1)
    return unit((weights[..., None] * vectors).sum(dim=1), dim=-1)


# ------------------------------------------------------------------------------------------------ losses


def hinge(scores: Tensor, margin: float = 0.2) -> Tensor:
    """Hardest negatives of both directions, summed."""
    diagonal = scores.diag().view(-1, 1)
    own = torch.eye(len(scores)) > 0.5
    captions = (margin + scores - diagonal.expand_as(scores)).clamp(min=0).masked_fill(own, 0)
    images = (margin + scores - diagonal.t().expand_as(scores)).clamp(min=0).masked_fill(own, 0)
    return captions.max(1)[0].sum() + images.max(0)[0].sum()


def vsrn_regions(model: nn.Module, batch: ImageBatch) -> Tensor:
    """VSRN's regions after reasoning (i, r, d): 1x1 convolutions over channels first, as published."""
    reasoning = model.reasoning
    x = reasoning.region_proj(batch.regions)
    if reasoning.architecture != "f30k":
        x = over_regions(x, reasoning.norm_axis)
    x = x.transpose(1, 2).contiguous()  # (i, d, r)
    for step in reasoning.steps:
        query, key, value = (
            F.conv1d(x, layer.weight[..., None], layer.bias) for layer in (step.q_proj, step.k_proj, step.v_proj)
        )
        affinity = torch.matmul(query.permute(0, 2, 1), key) / x.shape[2]
        messages = torch.matmul(affinity, value.permute(0, 2, 1)).permute(0, 2, 1).contiguous()
        x = step.norm(F.conv1d(messages, step.out_proj.weight[..., None], step.out_proj.bias)) + x
    return over_regions(x.transpose(1, 2).contiguous(), reasoning.norm_axis)


def over_regions(x: Tensor, axis: str) -> Tensor:
    return x / x.pow(2).sum(dim=1 if axis == "regions" else 2, keepdim=True).sqrt()


def vsrn_images(model: nn.Module, batch: ImageBatch) -> tuple[Tensor, Tensor]:
    """VSRN's image vectors (i, d) and its regions after reasoning."""
    regions = vsrn_regions(model, batch)
    pooled = model.gru_norm(model.region_gru(regions)[1][0])
    return pooled / pooled.pow(2).sum(dim=1, keepdim=True).sqrt(), regions


def vsrn_captioning(model: nn.Module, regions: Tensor, batch: PairBatch) -> Tensor:
    """Captioning loss with a decoder that always takes ``max_len - 1`` steps, a log-softmax in each, as published."""
    decoder, texts = model.caption_decoder, batch.texts
    states, last = decoder.encoder(decoder.dropout(decoder.input_proj(regions)))
    state, width = last[0], texts.words.shape[1]
    labels = F.pad(texts.words, (0, model.max_len - width))
    steps = []
    for word in decoder.word_embedding(labels[:, :-1]).unbind(dim=1):
        repeated = state[:, None].repeat(1, states.shape[1], 1)
        both = torch.tanh(decoder.attention_proj(torch.cat([states, repeated], dim=2)))
        weights = F.softmax(decoder.attention_score(both)[..., 0], dim=1)
        context = torch.bmm(weights[:, None], states)[:, 0]
        state = decoder.decoder(decoder.dropout(torch.cat([word, context], dim=1)), state)
        steps.append(F.log_softmax(decoder.out_proj(state), dim=1)[:, None])
    logits, targets = torch.cat(steps, dim=1), labels[:, 1:]
    counted = (torch.arange(1, model.max_len) <= texts.lengths[:, None]).to(logits)
    picked = logits.reshape(-1, logits.shape[2]).gather(1, targets.reshape(-1, 1))[:, 0]
    return -(picked * counted.reshape(-1)).sum() / len(batch)


def vsrn_loss(model: nn.Module, batch: PairBatch) -> Tensor:
    """VSRN's loss of a batch."""
    images, regions = vsrn_images(model, batch.images)
    texts = last_state(model.text_encoder.gru, model.text_encoder.word_embedding, batch.texts)
    return hinge(images @ texts.t()) + vsrn_captioning(model, regions, batch)


def vsepp_loss(model: nn.Module, batch: PairBatch) -> Tensor:
    """VSE++'s loss of a batch of images with one vector each."""
    images = model.image_proj(batch.images.regions[:, 0])
    images = images / images.pow(2).sum(dim=1, keepdim=True).sqrt()
    texts = last_state(model.text_encoder.gru, model.text_encoder.word_embedding, batch.texts)
    return hinge(images @ texts.t())


def aoq_loss(
    scores: Tensor, offline: tuple[Tensor, Tensor, Tensor, Tensor], alpha: float = 0.3, beta: float = 1.5
) -> Tensor:
    """AOQ's loss (equation 5): two weighted online terms, two offline and two derived ones."""
    diagonal, own = scores.diag(), torch.eye(len(scores)) > 0.5
    online_caption = scores.masked_fill(own, -torch.inf).max(1)[0]
    online_image = scores.masked_fill(own, -torch.inf).max(0)[0]
    captions, images, first, second = offline
    total = ((beta - (captions - online_caption) / alpha) * (0.2 - diagonal + online_caption).clamp(min=0)).sum()
    total = total + ((beta - (images - online_image) / alpha) * (0.2 - diagonal + online_image).clamp(min=0)).sum()
    return total + sum((term - diagonal).clamp(min=0).sum() for term in (captions, images, first, second))


def aoq_vsrn_loss(model: nn.Module, batch: PairBatch) -> Tensor:
    """AOQ over VSRN: three passes through the encoders."""
    parts = [batch, batch.offline.first, batch.offline.second]
    images, regions = zip(*(vsrn_images(model, part.images) for part in parts), strict=True)
    encoder = model.text_encoder
    texts = [last_state(encoder.gru, encoder.word_embedding, part.texts) for part in parts]
    pairs = ((0, 1), (1, 0), (1, 1), (2, 2))  # image, caption: negatives of each anchor, and the derived ones
    offline = tuple((images[i] * texts[c]).sum(dim=1) for i, c in pairs)
    return aoq_loss(images[0] @ texts[0].t(), offline) + vsrn_captioning(model, regions[0], batch)


def aoq_bfan_loss(model: nn.Module, batch: PairBatch, temperature: float, focal: str) -> Tensor:
    """AOQ over BFAN: three passes through the encoders, the offline negatives scored pair by pair."""
    parts = [batch, batch.offline.first, batch.offline.second]
    images, texts = zip(*(encode_regions_and_words(model, part) for part in parts), strict=True)
    pairs = ((0, 1), (1, 0), (1, 1), (2, 2))
    offline = tuple(bfan_pair_scores(images[i], texts[c], temperature, focal) for i, c in pairs)
    return aoq_loss(bfan_scores(images[0], texts[0], temperature, focal), offline)


# ------------------------------------------------------------------------------------------------ other losses


def encode_pfan(model: nn.Module, batch: PairBatch) -> tuple[Images, Texts]:
    """Encoders of PFAN: every region gathers the embeddings of its own blocks, and attends to them."""
    encoder, boxes = model.position_encoder, batch.images.boxes
    blocks, share = boxes[..., : boxes.shape[-1] // 2].long(), boxes[..., boxes.shape[-1] // 2 :]
    own = encoder.block_embedding(blocks)  # (i, r, k, p)
    query = encoder.query_proj(batch.images.regions)[:, :, None]
    weights = share * torch.tanh((own * query).sum(dim=-1)).exp()
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(EPS)
    positions = (weights[..., None] * own).sum(dim=2)
    regions = unit(model.region_proj(torch.cat([batch.images.regions, positions], dim=-1)), dim=-1)
    words = unit(read_words(model.gru, model.word_embedding, batch.texts), dim=-1)
    return Images(regions, batch.images.mask), Texts(words, batch.texts.mask, lengths=batch.texts.lengths)


def attention_weights(queries: Tensor, context: Tensor, temperature: float) -> Tensor:
    """SCAN's attention weights (b, q, k)."""
    affinity = unit(F.leaky_relu(torch.bmm(context, queries.transpose(1, 2).contiguous()), 0.1), dim=2)
    return F.softmax(affinity.transpose(1, 2).contiguous() * temperature, dim=2)


def pfan_scores(images: Images, texts: Texts, temperature: float = 9.0) -> Tensor:
    """PFAN's scores (i, c): SCAN's with the mean, and half of the mean largest weight."""
    columns = []
    for _, words in captions_of(texts):
        repeated = words.repeat(len(images), 1, 1)
        weights = attention_weights(repeated, images.local, temperature)
        relevance = cosine(repeated, torch.bmm(weights, images.local))
        columns.append((relevance + 0.5 * weights.max(dim=2)[0]).mean(dim=1, keepdim=True))
    return torch.cat(columns, dim=1)


def transformer_layer(layer: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Post-norm Transformer layer with PyTorch's own attention; nothing is padded."""
    attention = layer.attention
    q, k, v = (attention.split_heads(proj(x)) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = layer.attn_norm(x + attention.out_proj(attended))
    return layer.ffn_norm(x + layer.linear2(activation(layer.linear1(x))))


def text_cnn(cnn: nn.Module, texts: TextBatch) -> Tensor:
    """Convolutions and a maximum, one caption at a time, so that no padding counts."""
    captions = []
    for states, length in zip(texts.features, texts.lengths.tolist(), strict=True):
        tokens = F.pad(states[:length].t()[None], (0, max(0, 3 - length)))
        captions.append(torch.cat([conv(tokens).relu().max(dim=2)[0] for conv in cnn.convs], dim=1))
    return torch.cat(captions)


def saem_loss(model: nn.Module, batch: PairBatch) -> Tensor:
    """SAEM's loss: hinge, angular loss of the hardest negatives, norms of the image encoder's matrices."""
    encoder, regions = model.image_encoder, model.image_encoder.region_proj(batch.images.regions)
    for layer in encoder.layers:
        regions = transformer_layer(layer, regions, F.gelu)
    images = F.normalize(regions.mean(dim=1), dim=1)
    texts = F.normalize(model.text_encoder.proj(text_cnn(model.text_encoder.cnn, batch.texts)), dim=1)
    norms = sum(p.norm() for p in encoder.parameters() if p.dim() == 2)
    angular = angular_term(images, texts) + angular_term(texts, images)
    return hinge(images @ texts.t()) + 0.5 * angular + 0.01 * norms


def angular_term(anchors: Tensor, positives: Tensor) -> Tensor:
    """Angular loss of the hardest negative of each anchor, summed; anchor by anchor."""
    total = anchors.new_zeros(())
    for b in range(len(anchors)):
        others = torch.cat([positives[:b], positives[b + 1 :]])
        costs = 4 * others @ (anchors[b] + positives[b]) - 4 * anchors[b] @ positives[b]
        total = total + F.softplus(costs.max())
    return total


def intra_loss(model: nn.Module, batch: PairBatch) -> Tensor:
    """DCPA's stage one: top-k mean of the cosines of regions and a caption, one caption at a time."""
    regions = transformer_layer(model.encoder, model.region_proj(batch.images.regions), torch.relu)
    regions = F.normalize(regions, dim=-1)
    texts = F.normalize(model.text_proj(text_cnn(model.text_cnn, batch.texts)), dim=-1)
    columns = [(regions @ caption).topk(model.top_k, dim=1)[0].mean(dim=1) for caption in texts]
    return hinge(torch.stack(columns, dim=1))


def constrained_scan_loss(model: nn.Module, batch: PairBatch, margin: float = 0.2) -> Tensor:
    """SCAN's hinge, and CCR and CCS of every word and every swap, one pair and one word at a time."""
    images, texts = encode_regions_and_words(model, batch)
    total = hinge(scan_scores(images, texts, "t2i", 9.0, 6.0))
    for b, words in captions_of(texts):
        keys = images.local[b : b + 1]
        weights = attention_weights(words[None], keys, 9.0)[0]
        reverse = (1 - weights) / (1 - weights).sum(dim=1, keepdim=True)
        attended, opposite = weights @ keys[0], reverse @ keys[0]
        positive = cosine(words, attended)
        ccr = (cosine(words, opposite) - positive + margin).clamp(min=0).mean()
        swaps = []
        for w in range(len(words)):
            others = torch.cat([words[:w], words[w + 1 :]])
            swaps.append((cosine(others, attended[w].expand_as(others)) - positive[w] + margin).clamp(min=0))
        total = total + ccr + torch.cat(swaps).mean()
    return total
