"""Exercises of chapter 14."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from itm_lab.teaching.checks import Case, Draw, Exercise


def shortest_list(cheap, full):
    """Caption by caption, image by image."""
    lengths = []
    for caption in range(cheap.shape[1]):
        wanted = max(range(len(cheap)), key=lambda image: float(full[image, caption]))
        lengths.append(sum(bool(cheap[image, caption] >= cheap[wanted, caption]) for image in range(len(cheap))))
    return torch.tensor(lengths)


def ties_behind(cheap, full):
    return (cheap > cheap.gather(0, full.argmax(dim=0, keepdim=True))).sum(dim=0) + 1


def list_cases(draw: Draw) -> Iterator[Case]:
    yield Case("one image", (draw.uniform(1, 3), draw.uniform(1, 3)), "a list that holds it has length 1")
    yield Case("five images", (draw.uniform(5, 3), draw.uniform(5, 3)), "count the images that stand no lower")
    yield Case("as many images as captions", (draw.uniform(6, 6), draw.uniform(6, 6)), "one number per caption")
    cheap = draw.uniform(7, 9)
    cheap[2] = cheap[3]
    full = draw.uniform(7, 9)
    full[2, :3] += 1
    full[3, 3:6] += 1
    yield Case("ties", (cheap, full), "an image with the same cheap score stands before")
    yield Case("nothing but ties", (torch.zeros(4, 2), draw.uniform(4, 2)), "the list is as long as it can be")


LIST = Exercise(
    "ex-scale-list",
    shortest_list,
    list_cases,
    {
        "one too few: a list that holds the first image has length 1": lambda c, f: shortest_list(c, f) - 1,
        "an image with the same cheap score stands before": ties_behind,
        "the roles are exchanged: the list is by the cheap score": lambda c, f: shortest_list(f, c),
        "that is the other direction; it goes from captions to images": lambda c, f: shortest_list(c.T, f.T),
        "that is the number of the image which the full score ranks first; where does it stand?": lambda c, f: f.argmax(
            dim=0
        ),
        "the list holds the largest cheap scores, not the smallest": lambda c, f: shortest_list(-c, f),
        "the full score ranks the largest first; that is the image it ranks last": lambda c, f: shortest_list(c, -f),
        "that is a share of all images; return a length": lambda c, f: shortest_list(c, f) / len(c),
    },
    shape="(c,), one number per caption",
)


def ivf_search(vectors, centres, query, probes, read=None, cell=None):
    """List by list, vector by vector. read: lists instead of the nearest; cell: list of each vector instead of its own."""
    if cell is None:
        cell = [max(range(len(centres)), key=lambda m: float(centres[m] @ vector)) for vector in vectors]
    if read is None:
        read = sorted(range(len(centres)), key=lambda m: -float(centres[m] @ query))[:probes]
    there = [n for n in range(len(vectors)) if cell[n] in read]
    return max(there, key=lambda n: float(vectors[n] @ query), default=-1)


def within_lists(vectors, centres, query, probes):
    cell = (vectors @ centres.T).argmax(dim=1)
    there = torch.isin(cell, (centres @ query).topk(probes).indices)
    return (vectors[there] @ query).argmax() if there.any() else -1


def best_score(vectors, centres, query, probes):
    found = ivf_search(vectors, centres, query, probes)
    return vectors[found] @ query if found >= 0 else -1


def lowest(vectors, centres, query, probes):
    cell = (vectors @ centres.T).argmax(dim=1)
    read = (centres @ query).topk(probes).indices.tolist()
    there = [n for n in range(len(vectors)) if int(cell[n]) in read]
    return min(there, key=lambda n: float(vectors[n] @ query), default=-1)


def ivf_cases(draw: Draw) -> Iterator[Case]:
    def drawn(n: int, m: int, probes: int) -> tuple[object, ...]:
        return draw.normal(n, 3), draw.normal(m, 3), draw.normal(3), probes

    yield Case("every list is read", drawn(12, 4, 4), "reading all lists is exact search")
    for probes in (1, 1, 1, 2, 2, 2, 3, 3):
        yield Case(f"lists read: {probes} of 8", drawn(40, 8, probes), "read only the lists of the nearest centres")
    towards = draw.unit(3)
    near = towards + 0.1 * draw.normal(10, 3)
    yield Case(
        "the list that is read is empty",
        (near, torch.stack([towards, -towards]), -towards, 1),
        "return -1 if the lists hold nothing",
    )


IVF = Exercise(
    "ex-scale-ivf",
    ivf_search,
    ivf_cases,
    {
        "that is exact search: read only the lists of the nearest centres": lambda v, c, q, n: (v @ q).argmax(),
        "lists that hold nothing give -1": lambda v, c, q, n: max(0, ivf_search(v, c, q, n)),
        "only one list is read; read as many as `probes` says": lambda v, c, q, n: ivf_search(v, c, q, 1),
        "those are the lists of the farthest centres": lambda v, c, q, n: ivf_search(
            v, c, q, n, read=(-(c @ q)).topk(n).indices.tolist()
        ),
        "that vector has the smallest inner product with the query": lowest,
        "that is a number within the lists that are read; return the number of the vector": within_lists,
        "those are the first `probes` lists; read those nearest to the query": lambda v, c, q, n: ivf_search(
            v, c, q, n, read=list(range(n))
        ),
        "a vector belongs to the centre with the largest inner product, not at the smallest distance": lambda v, c, q, n: (
            ivf_search(v, c, q, n, cell=torch.cdist(v, c).argmin(dim=1).tolist())
        ),
        "that is the number of the list; return that of a vector in it": lambda v, c, q, n: (c @ q).argmax(),
        "that is the inner product itself; return the number of the vector": best_score,
    },
)


def quantised_scores(vectors, codebooks, query):
    """Vector by vector, part by part, code word by code word."""
    parts, _, width = codebooks.shape
    scores = torch.zeros(len(vectors))
    for n, vector in enumerate(vectors):
        for part in range(parts):
            piece, asked = (one[part * width : (part + 1) * width] for one in (vector, query))
            nearest = min(codebooks[part], key=lambda word, piece=piece: float((word - piece).square().sum()))
            scores[n] += nearest @ asked
    return scores


def in_parts(vectors, codebooks):
    """Parts (m, n, w) of vectors (n, m·w)."""
    return vectors.unflatten(1, (len(codebooks), -1)).transpose(0, 1)


def looked_up(codes, codebooks, asked):
    """Sums over parts of the inner products of code words with parts (m, w) of a query."""
    return (codebooks @ asked[..., None])[..., 0].gather(1, codes).sum(dim=0)


def codes_by(vectors, codebooks, farthest=False):
    distances = torch.cdist(in_parts(vectors, codebooks), codebooks)
    return distances.argmax(dim=-1) if farthest else distances.argmin(dim=-1)


def interleaved(vectors, codebooks, query):
    parts, _, width = codebooks.shape
    order = torch.arange(parts * width).view(width, parts).T.flatten()
    return quantised_scores(vectors[:, order], codebooks, query[order])


def compressed_query(vectors, codebooks, query):
    codes = codes_by(query[None], codebooks)[:, 0]
    words = torch.stack([book[code] for book, code in zip(codebooks, codes, strict=True)])
    return quantised_scores(vectors, codebooks, words.flatten())


def distances_to_query(vectors, codebooks, query):
    asked = query.view(len(codebooks), 1, -1)
    return (codebooks - asked).square().sum(dim=-1).gather(1, codes_by(vectors, codebooks)).sum(dim=0)


def quantised_cases(draw: Draw) -> Iterator[Case]:
    def drawn(n: int, parts: int, words: int, width: int) -> tuple[torch.Tensor, ...]:
        return draw.normal(n, parts * width), draw.normal(parts, words, width), draw.normal(parts * width)

    _, books, query = drawn(1, 2, 4, 3)
    exact = torch.stack([torch.cat([books[0, a], books[1, b]]) for a, b in ((0, 1), (2, 3), (3, 0))])
    yield Case("vectors made of code words", (exact, books, query), "nothing is lost: the exact inner products")
    yield Case("one part", drawn(5, 1, 4, 3), "the nearest code word stands for the vector")
    yield Case("two parts", drawn(6, 2, 5, 2), "each part has a codebook of its own")
    yield Case("four parts", drawn(7, 4, 6, 3), "the inner product is the sum over the parts")


QUANTISED = Exercise(
    "ex-scale-quantised",
    quantised_scores,
    quantised_cases,
    {
        "those are the vectors themselves; each part is to be replaced by a code word": lambda v, c, q: v @ q,
        "a code word is nearest by distance, not by the largest inner product": lambda v, c, q: looked_up(
            (in_parts(v, c) @ c.mT).argmax(dim=-1), c, q.view(len(c), -1)
        ),
        "the query stays as it is: only the vectors are compressed": compressed_query,
        "the numbers of a part lie together; yours are interleaved": interleaved,
        "that is the first part alone": lambda v, c, q: quantised_scores(v[:, : c.shape[2]], c[:1], q[: c.shape[2]]),
        "that is a mean over the parts; an inner product is their sum": lambda v, c, q: (
            quantised_scores(v, c, q) / len(c)
        ),
        "those are the farthest code words": lambda v, c, q: looked_up(
            codes_by(v, c, farthest=True), c, q.view(len(c), -1)
        ),
        "each part has a codebook of its own; all of yours use the first codebook": lambda v, c, q: quantised_scores(
            v, c[:1].expand_as(c), q
        ),
        "those are the codes; return an inner product per vector": lambda v, c, q: codes_by(v, c).T,
        "that is the squared distance to the query; return the inner product, not that": distances_to_query,
    },
    shape="(n,)",
)

EXERCISES = (LIST, IVF, QUANTISED)
