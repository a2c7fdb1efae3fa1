"""What a process puts into the store for others, when it leaves, and what becomes of plans that the store refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from hf_dcp.lookahead import link as links
from hf_dcp.lookahead import shelf as shelves
from hf_dcp.lookahead.link import StoreLink
from hf_dcp.lookahead.shelf import Shelf, name_of
from hf_dcp.lookahead.store import LocalStore, StoreAddress, StoreError

A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))


class Moody(LocalStore):
    """Refuses as long as it is told to."""

    refuses = False

    def replace(self, values: Mapping[str, bytes], forget: Iterable[str] = ()) -> None:
        if self.refuses:
            raise StoreError("not now")
        super().replace(values, forget)


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Moody, StoreLink]:
    monkeypatch.setattr(links, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(links, "LONGEST_PAUSE", 0.0)
    store = Moody(request.node.name)
    monkeypatch.setattr(StoreAddress, "open", lambda self, timeout=0: store)
    return store, StoreLink(StoreAddress("local", request.node.name))


def held(store: LocalStore) -> set[str]:
    return set(LocalStore._values[store.prefix])


def test_plans_stay_for_some_batches(moody: tuple[Moody, StoreLink]) -> None:
    store, link = moody
    shelf = Shelf(link, [1, 2], keep=2)
    for call, key in enumerate((A, B, C)):
        shelf.next_batch()
        assert shelf.put(key, {1: b"one", 2: b"other"}) == 8
        assert key in shelf and (A in shelf) == (call < 2)
    assert held(store) == {name_of(key, rank) for key in (B, C) for rank in (1, 2)}
    shelf.next_batch()
    shelf.tidy()
    assert held(store) == {name_of(C, 1), name_of(C, 2)}
    shelf.clear()
    assert held(store) == set()


def test_what_is_due_while_the_store_fails_leaves_it_later(
    moody: tuple[Moody, StoreLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, link = moody
    shelf = Shelf(link, [1], keep=1)
    for key in (A, B):
        shelf.next_batch()
        shelf.put(key, {1: b"one"})
        store.refuses = True
        shelf.next_batch()
        for _ in range(2):
            with pytest.raises(StoreError):
                shelf.tidy()
        store.refuses = False
    assert held(store) == {name_of(B, 1)}
    shelf.tidy()
    assert held(store) == set() and A not in shelf and B not in shelf
    # Of very many, the oldest are left to expire.
    monkeypatch.setattr(shelves, "MOST_DUE", 1)
    shelf.put(A, {1: b"one"})
    shelf.put(B, {1: b"one"})
    shelf.next_batch()
    shelf.tidy()
    assert held(store) == {name_of(A, 1)} and A not in shelf


def test_what_the_store_refused_is_put_there_later(moody: tuple[Moody, StoreLink]) -> None:
    store, link = moody
    shelf = Shelf(link, [1, 2], keep=4)
    store.refuses = True
    shelf.next_batch()
    with pytest.raises(StoreError):
        shelf.put(A, {1: b"one", 2: b"other"})
    assert shelf.tidy() == 0 and held(store) == set()  # the link is broken: nothing is tried
    store.refuses = False
    shelf.next_batch()
    shelf.put(B, {1: b"one"})
    assert held(store) == {name_of(B, 1)}
    assert shelf.tidy() == 8
    assert held(store) == {name_of(A, 1), name_of(A, 2), name_of(B, 1)}
    shelf.clear()
    assert held(store) == set()


def test_late_plans_are_put_once_and_not_when_nobody_can_want_them(moody: tuple[Moody, StoreLink]) -> None:
    store, link = moody
    shelf = Shelf(link, [1], keep=1)
    store.refuses = True
    for key in (A, B):
        shelf.next_batch()
        with pytest.raises(StoreError):
            shelf.put(key, {1: b"one"})
    store.refuses = False
    shelf.put(C, {1: b"one"})
    shelf.tidy()
    assert held(store) == {name_of(B, 1), name_of(C, 1)}  # A is too old
    store.refuses = True
    with pytest.raises(StoreError):
        shelf.put(A, {1: b"one"})
    link.trouble = ""
    with pytest.raises(StoreError):
        shelf.tidy()
    store.refuses, link.trouble = False, ""
    assert shelf.tidy() == 0  # refused twice: it is given up
    assert name_of(A, 1) not in held(store)
