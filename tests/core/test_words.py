from holdfast.core.words import NBSP, count, plainly


def test_a_number_agrees_with_its_noun():
    assert [plainly(number, "job") for number in (0, 1, 2, 3000)] == [
        "0 jobs",
        "1 job",
        "2 jobs",
        "3,000 jobs",
    ]
    assert plainly(1, "job runs", "jobs run") == "1 job runs"
    assert plainly(5, "job runs", "jobs run") == "5 jobs run"
    assert count(3000, "day") == f"3{NBSP}000{NBSP}days"
