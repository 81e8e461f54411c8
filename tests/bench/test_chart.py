from bench import chart


def test_the_chart_shows_what_the_results_record():
    assert chart.CHART.read_text(encoding="utf-8") == chart.chart(), "run python -m bench.chart"


def test_rates_and_ratios_are_those_of_the_tables():
    cpu, gpu = chart.smollm2(), chart.h200()
    off, *_, openvino = cpu.bars
    assert (off.name, off.ratio) == ("without speculation", 1.0) and openvino.rate > off.rate
    assert [bar.ratio for bar in gpu.bars if bar.kind == "ours"] == [2.28, 1.81, 1.49, 0.97]
