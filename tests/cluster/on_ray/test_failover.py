"""The show: a replica is killed in the middle of 500 requests, and all 500 are answered once."""

from __future__ import annotations

from rich.console import Console

from minillm.cluster.failover import FailoverSettings, expected_tokens, measure, passed, prompts_of, table
from tests.conftest import TinyPair


def test_a_killed_replica_loses_no_request(tiny: TinyPair) -> None:
    """500 requests to three replicas on two nodes, one of which is killed, with both routers.

    The killed one has a third of the 23 requests in flight, so some are sent again.
    """
    engine = {"num_kv_blocks": 96, "enforce_eager": True, "max_num_seqs": 8, "device": "cpu"}
    settings = FailoverSettings(str(tiny.target), 500, document_tokens=96, block_size=8, engine=engine)
    prompts = prompts_of(settings)
    result = measure(settings, prompts, expected_tokens(settings, prompts))
    assert passed(result)
    for row in result["rows"]:
        assert row["answered_once"] == row["status_200"] == row["same_tokens"] == row["requests"] == 500
        assert row["killed"] in row["requests_per_replica"] and row["in_flight_at_kill"] > 0 and row["sent_again"] > 0
    by_router = {row["router"]: row["cached_share"] for row in result["rows"]}
    assert by_router["prefix"] > by_router["power_of_two"]
    assert all(0 < ms < 1000 for row in result["rows"] for ms in row["processor_ms_per_request"].values())
    shown = Console(width=160, record=True)
    shown.print(table(result))
    assert "power_of_two" in shown.export_text()
