"""Phrases and their boxes: Scenes, and Flickr30K Entities from files made here, whole and damaged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from itm_lab.data.entities import NO_LETTERS, NOT_VISUAL, OUT_OF_IMAGE, UNBALANCED, UNMATCHED, entities_grounding
from itm_lab.scenes import load_scenes, scenes_folder
from itm_lab.scenes.phrases import scenes_grounding
from itm_utils.data.batches import WordCaptions
from itm_utils.data.phrases import Grounding, Phrase, phrase_of_words
from itm_utils.data.precomp import PrecompSplit, open_split
from itm_utils.data.text_encoder import bert_captions
from itm_utils.data.vocabulary import Vocabulary
from itm_utils.errors import ItmError

NO_BOXES = np.zeros((0, 4))


# -- the scenes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dev() -> Grounding:
    return scenes_grounding("dev")


def test_scenes_have_the_phrases_that_their_own_file_has(dev: Grounding) -> None:
    data = load_scenes("dev")
    written = json.loads((data.folder / "dev_grounding.json").read_text(encoding="utf-8"))
    assert len(dev.phrases) == len(data.captions) == len(written)
    assert dev.skipped == {}
    for caption, phrases, record, scene in zip(data.captions, dev.phrases, written, data.owner, strict=True):
        assert [caption.text[p.start : p.end] for p in phrases] == [p["text"] for p in record["phrases"]]
        for ours, theirs in zip(phrases, record["phrases"], strict=True):
            np.testing.assert_array_equal(ours.boxes, data.boxes[scene][theirs["objects"]])
            assert ours.boxes.shape == (len(theirs["objects"]), 4)
    assert max(len(p.boxes) for phrases in dev.phrases for p in phrases) > 1


def test_a_split_that_is_not_there() -> None:
    with pytest.raises(ItmError, match="split 'validation'"):
        scenes_grounding("validation")


def test_the_first_captions(dev: Grounding) -> None:
    assert dev.first(7).phrases == dev.phrases[:7]


# -- words of a phrase -----------------------------------------------------------------------------------------------


def by_characters(spans, phrases: list[Phrase]) -> list[int]:
    """The slow way: count the characters that each token shares with each phrase."""
    found = []
    for start, end in spans:
        inside = []
        for number, phrase in enumerate(phrases):
            shared = sum(phrase.start <= character < phrase.end for character in range(start, end))
            if shared > (end - start) / 2:
                inside.append((phrase.end - phrase.start, number))
        found.append(min(inside)[1] if inside else -1)
    return found


def test_words_find_their_phrase() -> None:
    #          0123456789012345678901234567
    caption = "a red fish and two blue boats"
    phrases = [Phrase(0, 10, NO_BOXES), Phrase(15, 29, NO_BOXES)]
    spans = [(0, 0), *((m.start(), m.end()) for m in re.finditer(r"\w+", caption)), (0, 0)]
    expected = [-1, 0, 0, 0, -1, 1, 1, 1, -1]
    np.testing.assert_array_equal(phrase_of_words(np.array(spans), phrases), expected)
    np.testing.assert_array_equal(phrase_of_words(torch.tensor(spans), phrases), expected)
    np.testing.assert_array_equal(phrase_of_words(np.array(spans), []), [-1] * len(spans))


def test_tokens_across_the_edge_of_a_phrase_and_phrases_in_phrases() -> None:
    whole, inner = Phrase(0, 12, NO_BOXES), Phrase(5, 9, NO_BOXES)
    spans = np.array([(0, 4), (5, 7), (7, 9), (4, 6), (10, 12), (11, 13), (11, 14), (12, 15)])
    found = phrase_of_words(spans, [whole, inner])
    np.testing.assert_array_equal(found, [0, 1, 1, 0, 0, -1, -1, -1])
    np.testing.assert_array_equal(found, by_characters(spans.tolist(), [whole, inner]))


def test_random_spans_as_counted_by_characters() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        starts = rng.integers(0, 30, size=(12, 1))
        spans = np.concatenate([starts, starts + rng.integers(0, 6, size=(12, 1))], axis=1)
        firsts = rng.choice(30, size=4, replace=False)
        phrases = [Phrase(a, a + n + 1, NO_BOXES) for n, a in enumerate(sorted(firsts.tolist()))]
        np.testing.assert_array_equal(phrase_of_words(spans, phrases), by_characters(spans.tolist(), phrases))


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_tokens_of_the_scenes_spell_their_phrases(dev: Grounding, kind: str) -> None:
    split = open_split(scenes_folder(), "dev").first(12)
    texts = WordCaptions(split, Vocabulary.of_folder(split.root)) if kind == "words" else bert_captions(split)
    batch = texts.batch(np.arange(split.n_captions), spans=True)
    inside_a_word = 0
    for row, caption in enumerate(split.captions):
        found = phrase_of_words(batch.spans[row], dev.phrases[row])
        assert (found[batch.special[row].numpy()] == -1).all()
        assert (found[int(batch.lengths[row]) :] == -1).all()
        for number, phrase in enumerate(dev.phrases[row]):
            own = batch.spans[row][found == number].tolist()
            spelled = "".join(caption[a:b] for a, b in own)
            assert spelled == caption[phrase.start : phrase.end].replace(" ", "")
            inside_a_word += sum(a > 0 and caption[a - 1].isalpha() for a, _ in own)
    assert (inside_a_word > 0) == (kind == "pieces")


# -- Flickr30K Entities ----------------------------------------------------------------------------------------------

SENTENCES = [
    "[/EN#1/people Two young men] walk [/EN#2/animals a dog] .",
    "[/EN#1/people Men] and [/EN#2/animals their dog] on [/EN#3/scene the grass] .",
]
OBJECTS = [
    ((1,), (11, 21, 51, 101)),
    ((1,), (61, 21, 91, 101)),
    ((2,), (31, 71, 61, 99)),
    ((3,), None),
]


def xml(objects=OBJECTS, size=(200, 100)) -> str:
    """As in the dataset: an object has names, and a box or two flags."""
    parts = []
    for names, box in objects:
        named = "".join(f"<name>{name}</name>" for name in names)
        if box is None:
            parts.append(f"<object>{named}<scene>1</scene><nobndbox>0</nobndbox></object>")
        else:
            sides = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
            corners = "".join(f"<{side}>{value}</{side}>" for side, value in sides)
            parts.append(f"<object>{named}<bndbox>{corners}</bndbox></object>")
    measures = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    return f"<annotation><filename>7.jpg</filename>{measures}{''.join(parts)}</annotation>"


def make_split(root: Path, captions: list[list[str]], sizes=None, names: bool = True) -> PrecompSplit:
    """Images 7, 8, … with the given captions."""
    root.mkdir(parents=True, exist_ok=True)
    np.save(root / "test_ims.npy", np.zeros((len(captions), 2, 3), dtype=np.float32))
    np.save(root / "test_owners.npy", np.repeat(np.arange(len(captions)), [len(own) for own in captions]))
    (root / "test_caps.txt").write_text("\n".join(c for own in captions for c in own) + "\n", encoding="utf-8")
    if names:
        (root / "test_ids.txt").write_text("".join(f"{7 + n}.jpg\n" for n in range(len(captions))))
    if sizes is not None:
        np.save(root / "test_sizes.npy", np.array(sizes))
    return open_split(root, "test")


def make_entities(root: Path, sentences: list[list[str]], objects=OBJECTS, size=(200, 100)) -> Path:
    for folder in ("Sentences", "Annotations"):
        (root / folder).mkdir(parents=True)
    for number, lines in enumerate(sentences, start=7):
        (root / "Sentences" / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (root / "Annotations" / f"{number}.xml").write_text(xml(objects, size), encoding="utf-8")
    return root


def read(tmp_path: Path, sentences: list[str], captions: list[str], objects=OBJECTS, **more) -> Grounding:
    """One image."""
    folder = make_entities(tmp_path / "entities", [sentences], objects)
    return entities_grounding(folder, make_split(tmp_path / "data", [captions], **more))


def texts(grounding: Grounding, captions: list[str]) -> list[list[str]]:
    return [[text[p.start : p.end] for p in own] for text, own in zip(captions, grounding.phrases, strict=True)]


@pytest.mark.parametrize(
    ("first", "phrases"),
    [
        ("Two young men walk a dog .", ["Two young men", "a dog"]),
        ("two young men walk a dog", ["two young men", "a dog"]),
        ("Two  young-men walk, a dog...", ["Two  young-men", "a dog"]),
        ("«TWO YOUNG MEN» WALK A D'OG!", ["TWO YOUNG MEN", "A D'OG"]),
        ("twoyoungmenwalkadog", ["twoyoungmen", "adog"]),
    ],
)
def test_captions_that_are_spelled_alike_are_aligned(tmp_path: Path, first: str, phrases: list[str]) -> None:
    captions = [first, "men and their dog on the grass."]
    found = read(tmp_path, SENTENCES, captions)
    assert texts(found, captions) == [phrases, ["men", "their dog", "the grass"]]
    assert found.skipped == {}
    men, dog = found.phrases[0]
    np.testing.assert_array_equal(men.boxes, [[10, 20, 50, 100], [60, 20, 90, 100]])  # pixels from 0, all its boxes
    np.testing.assert_array_equal(dog.boxes, [[30, 70, 60, 98]])
    assert found.phrases[1][2].boxes.shape == (0, 4)  # a scene has no box, and is still a phrase


def test_accents_and_letters_that_are_several(tmp_path: Path) -> None:
    sentences = ["[/EN#1/people Two] at [/EN#2/other a cafe\u0301] , [/EN#3/other the \ufb01sh] ate ½ ."]
    captions = ["two at a café, the fish ate 1/2"]
    found = read(tmp_path, sentences, captions)
    assert texts(found, captions) == [["two", "a café", "the fish"]]


@pytest.mark.parametrize(
    ("sentence", "caption", "phrases", "skipped"),
    [
        ("[/EN#1/bodyparts/people A man 's arm] .", "A man's arm.", ["A man's arm"], {}),  # several types
        ("[/EN#1/people Men] hug [/EN#0/notvisual each other] .", "men hug each other", ["men"], {NOT_VISUAL: 1}),
        ("[/EN#1/people Men] and [/EN#1/people men] .", "men and men", ["men", "men"], {}),  # a chain twice
        ("[/EN#99/other A sign] [/EN#1/people he] .", "a sign he", ["a sign", "he"], {}),  # a chain without object
        ("[/EN#1/people Men in [/EN#2/other hats]] .", "men in hats.", ["men in hats", "hats"], {}),  # nested
        ("[/EN#1/people Men] [sic] , [/EN#2/x a [ big ] dog] .", "men [sic], a [big] dog", ["men", "a [big] dog"], {}),
        ("[/EN#1/people Men] [/EN#2/other !!] .", "men !!", ["men"], {NO_LETTERS: 1}),
        ("[/EN#1/people] [/EN#1/people Men] .", "men", ["men"], {NO_LETTERS: 1}),  # nothing marked
        ("A plain sentence .", "a plain sentence", [], {}),
        ("[/EN#2/people Men] [/EN#3/people walk .", "men walk", [], {UNBALANCED: 1}),
        ("[/EN#2/people Men] walk ] .", "men walk", [], {UNBALANCED: 1}),
        ("[/EN#2/people Men] walk .", "men run", [], {UNMATCHED: 1}),
        ("[/EN#2/people Men] walk .", "men walk away", [], {UNMATCHED: 1}),
        ("[/EN#x/people Men] walk .", "men walk", [], {UNMATCHED: 1}),  # no chain id: not a mark
    ],
)
def test_marks_usual_and_odd(tmp_path: Path, sentence: str, caption: str, phrases: list[str], skipped: dict) -> None:
    whole = "[/EN#2/animals A dog] runs ."
    captions = ["A dog runs.", caption]
    found = read(tmp_path, [whole, sentence], captions)
    assert texts(found, captions) == [["A dog"], phrases]
    assert found.skipped == skipped


@pytest.mark.parametrize(
    ("box", "odd"), [((1, 1, 200, 100), 0), ((0, 1, 201, 101), 0), ((1, 1, 203, 90), 1), ((-9, 1, 9, 9), 1)]
)
def test_boxes_that_leave_their_image_are_kept_and_counted(tmp_path: Path, box: tuple[int, ...], odd: int) -> None:
    found = read(tmp_path, ["[/EN#1/people Men] walk ."], ["men walk"], [(["1"], box)])
    np.testing.assert_array_equal(found.phrases[0][0].boxes, [np.array(box) - 1])
    assert found.skipped == ({OUT_OF_IMAGE: 1} if odd else {})


def test_sentences_in_another_order_and_fewer_captions_than_sentences(tmp_path: Path) -> None:
    captions = ["men and their dog on the grass"]
    found = read(tmp_path, [*SENTENCES, "Nobody ."], captions)
    assert texts(found, captions) == [["men", "their dog", "the grass"]]
    more = read(tmp_path / "more", SENTENCES[:1], ["two young men walk a dog", "a third caption"])
    assert [len(own) for own in more.phrases] == [2, 0]
    assert more.skipped == {UNMATCHED: 1}


def test_of_two_sentences_spelled_alike_each_caption_has_its_own(tmp_path: Path) -> None:
    sentences = ["[/EN#1/people Men] walk .", "Men [/EN#2/other walk] ."]
    captions = ["men walk", "men walk"]
    assert texts(read(tmp_path, sentences, captions), captions) == [["men"], ["walk"]]


def test_phrases_of_another_image_are_never_used(tmp_path: Path) -> None:
    folder = make_entities(tmp_path / "entities", [SENTENCES[:1], SENTENCES[1:]])
    captions = [["two young men walk a dog"], ["men and their dog on the grass"]]
    split = make_split(tmp_path / "data", captions, names=False)
    assert [len(own) for own in entities_grounding(folder, split, ["pictures/7.jpg", "8"]).phrases] == [2, 3]
    with pytest.raises(ItmError, match=r"not one caption of split test .*order of the split"):
        entities_grounding(folder, split, [8, 7])


def test_an_object_with_several_names_and_none_with_a_box(tmp_path: Path) -> None:
    captions = ["two young men walk a dog", "men and their dog on the grass"]
    found = read(tmp_path, SENTENCES, captions, [((1, 2), (1, 1, 11, 11)), ((2,), (5, 5, 5, 9))])
    men, dog = found.phrases[0]
    np.testing.assert_array_equal(men.boxes, [[0, 0, 10, 10]])
    np.testing.assert_array_equal(dog.boxes, [[0, 0, 10, 10], [4, 4, 4, 8]])
    bare = read(tmp_path / "bare", SENTENCES, captions, [])
    assert [len(p.boxes) for p in bare.phrases[0]] == [0, 0]


def test_boxes_follow_the_size_of_the_image_in_the_split(tmp_path: Path) -> None:
    captions = ["two young men walk a dog"]
    found = read(tmp_path, SENTENCES, captions, sizes=[[101, 50]])
    np.testing.assert_allclose(found.phrases[0][1].boxes, [[15.15, 35, 30.3, 49]])
    with pytest.raises(ItmError, match=r"7\.xml: found an image of 200 x 100 pixels, .* 100 x 200"):
        read(tmp_path / "turned", SENTENCES, captions, sizes=[[100, 200]])


def test_names_of_images_are_needed(tmp_path: Path) -> None:
    folder = make_entities(tmp_path / "entities", [SENTENCES])
    split = make_split(tmp_path / "data", [["men"]], names=False)
    with pytest.raises(ItmError, match="image_names: found none"):
        entities_grounding(folder, split)
    with pytest.raises(ItmError, match="image_names: found 2, expected the file names of 1 images"):
        entities_grounding(folder, split, ["7", "8"])


DAMAGED = {
    "no sentences": ("Sentences/7.txt", None, "no such file"),
    "no boxes": ("Annotations/7.xml", None, "no such file"),
    "empty sentences": ("Sentences/7.txt", b"", "no sentence"),
    "blank sentences": ("Sentences/7.txt", b"\n \n", "no sentence"),
    "not UTF-8": ("Sentences/7.txt", b"[/EN#1/people M\xe9n] .", "not UTF-8 at position 15"),
    "empty XML": ("Annotations/7.xml", b"", "a damaged file"),
    "unknown encoding": ("Annotations/7.xml", b'<?xml version="1.0" encoding="klingon"?><a/>', "unknown encoding"),
    "endless number": ("Annotations/7.xml", xml(size=("9" * 400, 100)).encode(), "a damaged file"),
    "cut XML": ("Annotations/7.xml", xml().encode()[:-30], "a damaged file"),
    "a page": ("Annotations/7.xml", b"<html><body>404</body></html>", "no size/width"),
    "entities": (
        "Annotations/7.xml",
        b'<!DOCTYPE a [<!ENTITY b "b">]><annotation>&b;</annotation>',
        "entities of its own",
    ),
    "no size": ("Annotations/7.xml", b"<annotation></annotation>", "no size/width"),
    "no name": ("Annotations/7.xml", xml([((), (1, 1, 5, 5))]).encode(), "an object without a name"),
    "empty name": ("Annotations/7.xml", xml([(("",), (1, 1, 5, 5))]).encode(), "an object without a name"),
    "no number": ("Annotations/7.xml", xml([((1,), (1, "left", 5, 5))]).encode(), "invalid literal"),
    "a side missing": ("Annotations/7.xml", xml().replace("xmax", "xmix").encode(), "no bndbox/xmax"),
    "turned box": ("Annotations/7.xml", xml([((1,), (9, 1, 5, 5))]).encode(), "ends before it begins"),
    "flat image": ("Annotations/7.xml", xml(size=(0, 100)).encode(), "0 x 100 pixels"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    name, content, message = DAMAGED[damage]
    folder = make_entities(tmp_path / "entities", [SENTENCES])
    path = folder / name
    path.unlink() if content is None else path.write_bytes(content)
    split = make_split(tmp_path / "data", [["two young men walk a dog"]])
    with pytest.raises(ItmError, match=re.escape(message)) as caught:
        entities_grounding(folder, split)
    assert str(caught.value).startswith(str(path))
