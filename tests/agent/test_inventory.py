"""Which GPU sits where, told when it is news."""

from __future__ import annotations

from eagle_eye.agent.collectors.nvml import AGAIN_S, LINKS_S, InstalledGpu, Inventory

ONE, TWO = InstalledGpu(0, "GPU-1", "H100"), InstalledGpu(1, "GPU-2", "H100")


def test_all_gpus_are_reported_at_the_start_and_then_only_now_and_then() -> None:
    inventory = Inventory()
    first = inventory.news([TWO, ONE], 100.0, 0.0)
    assert [(event.kind, event.device, event.attributes) for event in first] == [
        ("inventory", 0, {"uuid": "GPU-1", "model": "H100", "gpus": 2}),
        ("inventory", 1, {"uuid": "GPU-2", "model": "H100", "gpus": 2}),
    ]
    assert inventory.news([ONE, TWO], 101.0, AGAIN_S - 1) == []
    assert len(inventory.news([ONE, TWO], 102.0, AGAIN_S)) == 2
    assert inventory.news([ONE, TWO], 103.0, AGAIN_S + 1) == []


def test_a_gpu_that_comes_goes_or_changes_place_is_news() -> None:
    inventory = Inventory()
    inventory.news([ONE], 100.0, 0.0)
    assert len(inventory.news([ONE, TWO], 101.0, 1.0)) == 2
    assert len(inventory.news([ONE], 102.0, 2.0)) == 1
    assert len(inventory.news([ONE._replace(device=3)], 103.0, 3.0)) == 1
    assert inventory.news([ONE._replace(device=3)], 104.0, 4.0) == []


def test_a_library_without_gpus_is_no_news_and_forgets_none() -> None:
    inventory = Inventory()
    inventory.news([ONE], 100.0, 0.0)
    assert inventory.news([], 101.0, 1.0) == []
    assert inventory.news([ONE], 102.0, 2.0) == []


def test_where_it_sits_and_its_serial_are_told_where_they_are_known() -> None:
    seats = [InstalledGpu(0, "GPU-a", "H100", "00000000:1B:00.0", "1652"), InstalledGpu(1, "GPU-b", "H100")]
    reported = [event.attributes for event in Inventory().news(seats, 100.0, 0.0)]
    assert reported == [
        {"uuid": "GPU-a", "model": "H100", "pci_address": "00000000:1B:00.0", "serial": "1652", "gpus": 2},
        {"uuid": "GPU-b", "model": "H100", "gpus": 2},
    ]


def test_links_that_come_and_go_are_reported_once_a_minute() -> None:
    inventory, fewer = Inventory(), ONE._replace(nvlinks=17)
    (first,) = inventory.news([ONE._replace(nvlinks=18)], 100.0, 0.0)
    assert first.attributes["nvlinks"] == 18
    assert inventory.news([fewer], 101.0, LINKS_S - 1) == []
    (second,) = inventory.news([fewer], 102.0, LINKS_S)
    assert second.attributes["nvlinks"] == 17
