"""Dashboard, alerts and documents: their metrics and labels exist, their queries parse, and the alerts fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.observe.metrics import Metrics, RequestTimes, descriptions
from tests.support.manifests import MANIFESTS, ROOT
from workers.comm.ipc import EngineStats

MONITORING = MANIFESTS / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"]
         for rule in group["rules"]]  # fmt: skip
GUIDE = ROOT / "docs" / "guides" / "monitoring.md"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
ADDED = {"job", "instance", "pod", "namespace", "ray_io_cluster", "ray_io_node_type"}
"""Labels that the PodMonitor or Prometheus adds."""


def exported() -> dict[str, set[str]]:
    """Return the label names of every sample that a service exports once it has seen every kind of event."""
    stats = EngineStats(pruned_per_depth=[1], verified_per_depth=[1], greedy_acceptance=[1.0], sampled_acceptance=[1.0])
    metrics = Metrics("model", "replica", lambda: replace(stats))
    metrics.observe_tokens(2, 1, is_copied=False, gap_s=0.1)
    metrics.observe_rejected()
    metrics.observe_queued(0.1)
    times = RequestTimes(scheduled=0.1, first_token=0.5, last_token=1.0, end=1.0)
    metrics.observe_finished("stop", times, prompt_tokens=1, generation_tokens=2, max_tokens=8)
    metrics.observe_key_request("team", "accepted")
    metrics.observe_key_tokens("team", 1, 1)
    metrics.observe_http("GET", "/health", 200, 0.01)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


METRICS = exported()


def test_the_reference_describes_exactly_what_is_exported() -> None:
    described = {d.name + ("_total" if d.kind == "counter" else ""): set(d.labels) for d in descriptions()}
    families = {name.removesuffix("_count") for name in METRICS if name.endswith("_count")}
    found = {name: labels for name, labels in METRICS.items() if not re.search(r"_(bucket|sum|count|created)$", name)}
    found |= {family: METRICS[f"{family}_count"] for family in families}
    assert described == {name: labels for name, labels in found.items() if not name.startswith("process_")}


def test_the_reference_names_metrics_that_exist() -> None:
    hooks = (ROOT / "docs" / "hooks.py").read_text()
    stems = re.search(r"VLLM_METRICS = frozenset\((.*?)\.split", hooks, re.DOTALL)[1]
    same = {f"secateur_{stem}" for line in re.findall(r'"(.*?)"', stems) for stem in line.split()}
    assert len(same) > 20 and same <= {description.name for description in descriptions()}
    mentioned = {name for name in re.findall(r"\b(?:secateur|process)_\w+", hooks) if name != "secateur_"}
    assert len(mentioned) > 8 and mentioned <= set(METRICS) | {description.name for description in descriptions()}


class Query(NamedTuple):
    origin: str
    text: str

    def __str__(self) -> str:
        return self.origin


def queries() -> Iterator[Query]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield Query(f"dashboard-{panel['id']}{target['refId']}", target["expr"])
    for rule in RULES:
        yield Query(rule["alert"], rule["expr"])
    for number, block in enumerate(re.findall(r"^```promql\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)):
        for part, text in enumerate(block.strip().split("\n\n")):
            yield Query(f"guide-{number}.{part}", text)


QUERIES = list(queries())


def without_variables(text: str) -> str:
    """Replace Grafana's variables by values, which make it PromQL."""
    text = re.sub(r"\$__(rate_interval|range|interval)\b", "5m", text)
    assert "$__" not in text
    return text.replace("$model", ".*")


def names(text: str) -> set[str]:
    return set(re.findall(r"\b(?:ray_)?secateur_\w+", text))


# Names


def test_every_query_of_the_dashboard_and_the_alerts_is_read() -> None:
    assert sum(query.origin.startswith("dashboard") for query in QUERIES) > 30
    assert len(RULES) >= 7 and len(METRICS) > 40


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_names_metrics_that_exist(query: Query) -> None:
    assert names(query.text) and names(query.text) <= set(METRICS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_documents_name_metrics_that_exist(document: Path) -> None:
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in METRICS}
    mentioned = {name for name in names(document.read_text()) if not name.startswith("secateur_llm")}
    assert mentioned <= families | set(METRICS)


def test_the_dashboard_s_variable_reads_an_existing_metric_and_label() -> None:
    [model] = [variable for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", model["query"]["query"]).groups()
    assert label in METRICS[metric]


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    cells = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        own = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert box["x"] + box["w"] <= 24 and not own & cells, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


# PromQL


def selectors(promql: Any, node: Any) -> Iterator[Any]:
    """Yield the vector selectors of a parsed query."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for part in children(promql, node):
        yield from selectors(promql, part)


def children(promql: Any, node: Any) -> list[Any]:
    match node:
        case promql.BinaryExpr():
            return [node.lhs, node.rhs]
        case promql.Call():
            return list(node.args)
        case promql.MatrixSelector():
            return [node.vector_selector]
        case promql.VectorSelector() | promql.NumberLiteral() | promql.StringLiteral():
            return []
        case _:
            return [node.expr]


def aggregations(promql: Any, node: Any) -> Iterator[Any]:
    if isinstance(node, promql.AggregateExpr):
        yield node
    for part in children(promql, node):
        yield from aggregations(promql, part)


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_parses_and_its_labels_exist(query: Query) -> None:
    promql = pytest.importorskip("promql_parser")
    parsed = promql.parse(without_variables(query.text))
    found = list(selectors(promql, parsed))
    assert {selector.name for selector in found} == names(query.text)
    for selector in found:
        asked = {matcher.name for matcher in selector.matchers.matchers}
        assert asked <= METRICS[selector.name] | ADDED
    for aggregation in aggregations(promql, parsed):
        available = set.intersection(*(METRICS[s.name] for s in selectors(promql, aggregation.expr)))
        assert aggregation.modifier is None or set(aggregation.modifier.labels) <= available | ADDED


def test_a_wrong_query_does_not_parse() -> None:
    promql = pytest.importorskip("promql_parser")
    for wrong in ("rate(secateur_engine_steps_total)", "sum by (x (up)", "max by (replica) up"):
        with pytest.raises(ValueError, match=r"."):
            promql.parse(wrong)


# Alerts


def test_the_guide_explains_every_alert() -> None:
    explained = re.findall(r"^\| `(Secateur\w+)` \|", GUIDE.read_text(), re.MULTILINE)
    assert explained == [rule["alert"] for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_s_text_uses_labels_that_its_query_keeps(rule: dict[str, Any]) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    kept = [set(re.split(r",\s*", group)) for group in re.findall(r"\bby \(([^)]*)\)", rule["expr"])]
    assert used <= set.union(set(), *kept)
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description"} == set(rule["annotations"])


class Scenario(NamedTuple):
    series: dict[str, str]
    """Sample values a minute apart, in promtool's notation."""
    firing: set[str]


ONE = 'model_name="m", replica="a"'
RUNNING = {f"secateur_engine_steps_total{{{ONE}}}": "0+100x90"}
SCENARIOS = {
    "nothing is scraped": Scenario({}, {"SecateurDown"}),
    "all is well": Scenario(
        RUNNING | {
            f"secateur_drafter_connected{{{ONE}}}": "1x90",
            f"secateur_num_drafter_losses_total{{{ONE}}}": "0x30 1x59",
            f"secateur_num_requests_waiting{{{ONE}}}": "3 0 2 0 4 0 0 9 0 3x80",
            f"secateur_requests_rejected_total{{{ONE}}}": "0 7x89",
            f"secateur_kv_cache_usage_perc{{{ONE}}}": "0.99x90",
            f"secateur_num_preemptions_total{{{ONE}}}": "5x90",
            f'secateur_request_success_total{{{ONE}, finished_reason="stop"}}': "0+99x90",
            f'secateur_request_success_total{{{ONE}, finished_reason="error"}}': "0+1x90",
            f'secateur_http_requests_total{{{ONE}, method="GET", handler="/health", status="503"}}': "0+9x90",
            f'secateur_http_requests_total{{{ONE}, method="POST", handler="/v1/completions", status="200"}}': "0+9x90",
        },
        set(),
    ),
    "a service without a drafter": Scenario(
        RUNNING | {
            f"secateur_drafter_connected{{{ONE}}}": "0x90",
            f"secateur_num_drafter_losses_total{{{ONE}}}": "0x90",
        },
        set(),
    ),
    "a drafter is lost for good": Scenario(
        RUNNING | {
            f"secateur_drafter_connected{{{ONE}}}": "1x70 0x20",
            f"secateur_num_drafter_losses_total{{{ONE}}}": "0x70 1x20",
        },
        {"SecateurDrafterLost"},
    ),
    "the queue grows": Scenario(
        RUNNING | {f"secateur_num_requests_waiting{{{ONE}}}": "0x60 1+2x30"}, {"SecateurQueueGrowing"}
    ),
    "requests are rejected": Scenario(
        RUNNING | {f"secateur_requests_rejected_total{{{ONE}}}": "0x60 0+5x30"}, {"SecateurRequestsRejected"}
    ),
    "pages are short": Scenario(
        RUNNING | {
            f"secateur_kv_cache_usage_perc{{{ONE}}}": "0.97x90",
            f"secateur_num_preemptions_total{{{ONE}}}": "0+2x90",
        },
        {"SecateurKvPressure"},
    ),
    "requests fail": Scenario(
        RUNNING | {
            f'secateur_request_success_total{{{ONE}, finished_reason="stop"}}': "0+90x90",
            f'secateur_request_success_total{{{ONE}, finished_reason="error"}}': "0+10x90",
        },
        {"SecateurErrorRatio"},
    ),
    "the service is unavailable": Scenario(
        RUNNING | {
            f'secateur_http_requests_total{{{ONE}, method="POST", handler="/v1/completions", status="503"}}': "0+1x90",
            f'secateur_http_requests_total{{{ONE}, method="POST", handler="/v1/completions", status="200"}}': "0+9x90",
        },
        {"SecateurErrorRatio"},
    ),
    "the engine restarts and restarts": Scenario(
        {f"secateur_engine_steps_total{{{ONE}}}": "0+100x60 0+100x8 0+100x8 0+100x11"}, {"SecateurRestarts"}
    ),
    "replicas are replaced": Scenario(
        {f'secateur_engine_steps_total{{model_name="m", replica="{name}"}}': f"_x{30 + 15 * at} 0+100x{last}"
         for at, (name, last) in enumerate({"a": 14, "b": 14, "c": 14, "d": 14}.items())},
        {"SecateurRestarts"},
    ),
}  # fmt: skip


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_the_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    spec = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
    tests = []
    for name, scenario in SCENARIOS.items():
        checks = []
        for rule in RULES:
            query = f'count(ALERTS{{alertname="{rule["alert"]}", alertstate="firing"}})'
            expected = [{"labels": "{}", "value": 1}] if rule["alert"] in scenario.firing else []
            checks.append({"expr": query, "eval_time": "88m", "exp_samples": expected})
        series = [{"series": series, "values": values} for series, values in scenario.series.items()]
        tests.append({"name": name, "interval": "1m", "input_series": series, "promql_expr_test": checks})
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": tests}))
    ended = subprocess.run(["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
