"""Hostile requests: forged, foreign names, no session, bad paths, scripts, large bodies."""

import pytest
import sample_runs
from console_home import HOST, OWN, add_log, open_console

from holdfast.core.paths import RunPaths
from holdfast.ui import Address
from holdfast.ui.console.serving import hosts_of
from holdfast.ui.console.sessions import CODES_LIMIT
from holdfast.ui.console.static_files import path_of

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>"


@pytest.fixture
def console(home):
    with open_console(home) as console:
        console.ledger.set_run("demo-1", state="running")
        yield console


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1:9999", "127.0.0.1", "", "127.0.0.1:8470.evil.example"]
)
@pytest.mark.parametrize("path", ["/", "/stream", "/now.json", path_of("console.js")])
def test_a_rebound_name_is_refused_on_every_path(console, host, path):
    assert console.get(path, headers={"host": host}).status_code == 421


def test_an_empty_name_allows_no_empty_host():
    assert hosts_of(Address(names=("",))) == hosts_of(Address())


@pytest.mark.parametrize(
    "forged",
    [
        {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
        {"sec-fetch-site": "same-site", "origin": f"http://{HOST}"},
        {"sec-fetch-site": "none", "origin": f"http://{HOST}"},
        {"sec-fetch-site": "same-origin", "origin": "https://evil.example"},
        {"sec-fetch-site": "same-origin", "origin": "null"},
        {"origin": f"https://{HOST}"},
        {"origin": f"http://{HOST}.evil.example"},
        {},
    ],
    ids=str,
)
def test_a_forged_form_acts_on_nothing(console, forged):
    form = console.form("stop", "demo-1")
    assert console.act("stop", form, headers=forged).status_code == 403
    assert console.orders == []


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"])
def test_no_other_method_is_served(console, method):
    assert console.client.request(method, "/act/stop?target=demo-1", headers=OWN).status_code == 405
    assert console.orders == []


def test_the_head_of_the_stream_ends(console):
    assert console.client.head("/stream").headers["content-type"].startswith("text/event-stream")


def test_consoles_on_two_ports_of_a_host_have_two_cookies(console, home):
    with open_console(home, signed_in=False, port=8471) as other:
        entered = other.client.post(
            "/enter", data={"code": other.links[-1].partition("#")[2]},
            headers={**OWN, "host": "127.0.0.1:8471", "origin": "http://127.0.0.1:8471"},
        )  # fmt: skip
    assert entered.status_code == 303
    assert entered.headers["set-cookie"].partition("=")[0] not in console.client.cookies


def test_an_action_is_never_a_get(console):
    assert console.get("/act/stop?target=demo-1&key=" + "a" * 32).status_code == 200
    assert console.orders == []


def test_foreign_pages_neither_fetch_nor_embed_a_page_but_may_link_to_it(console):
    fetched = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
    framed = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "iframe",
    }
    linked = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert console.get("/now.json", headers=fetched).status_code == 403
    assert console.get("/stream", headers=fetched).status_code == 403
    assert console.get("/", headers=framed).status_code == 403
    assert console.get("/", headers=linked).status_code == 200


def test_a_body_over_the_limit_and_a_foreign_type_are_refused(console):
    form = console.form("stop", "demo-1")
    assert console.act("stop", form, why="x" * 17_000).status_code == 413
    sent = console.client.post("/act/stop", json=form, headers=OWN)
    assert sent.status_code == 415
    assert console.get("/?" + "x" * 3000).status_code == 414
    assert console.orders == []


@pytest.mark.parametrize(
    "path",
    ["/runs/..%2f..%2fetc%2fpasswd/logs", "/runs/..%5c..%5cetc/logs", "/static/..%2fgate.py", "/static/gate.py",
     "/runs/demo-1/logs?rank=../../../etc/passwd", "/runs/demo-1/logs?attempt=1/../..", "/runs/%00/logs",
     "/runs/demo-1/logs?rank=%2e%2e"],
)  # fmt: skip
def test_no_path_of_a_request_is_opened(console, path):
    answer = console.get(path)
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text


def test_a_link_in_the_place_of_a_log_is_not_followed(home, console):
    secret = home / "secret"
    secret.write_text("the secret\n")
    log = RunPaths(home, "demo-1").rank_log(1, 5)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.symlink_to(secret)
    told = console.get("/runs/demo-1/logs.json?attempt=1&rank=5").json()
    assert told["ranks"] == [5]
    assert told["lines"] == []


def test_what_logs_names_and_metrics_say_stays_text(home, console):
    add_log(home, "demo-1", 1, 0, f"{EVIL}\x1b[31mred\x1b[0m\x00\n")
    console.ledger.set_run("demo-1", outcome=EVIL, command=["python", EVIL], state="failed")
    console.ledger.cordon(EVIL, at_s=1.0, by=EVIL, why=EVIL)
    diagnosis = sample_runs.diagnosis(EVIL, EVIL, [(f"logs/attempt-001/{EVIL}", 1, EVIL, "root")])
    console.ledger.set_incident(1, diagnosis=diagnosis, explanation=EVIL)
    for path in ("/", "/runs/demo-1", "/runs/demo-1/logs?attempt=1&rank=0", "/incidents/1", "/nodes",
                 f"/runs/demo-1/logs?q={EVIL}", f"/runs/{EVIL.replace('/', '')}"):  # fmt: skip
        answer = console.get(path)
        assert "<script>alert" not in answer.text, path
        assert "<img src=x" not in answer.text, path
        assert "\x1b" not in answer.text
        assert "\x00" not in answer.text
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in policy


# Sessions


def test_nothing_is_shown_or_done_without_a_session(home):
    with open_console(home, signed_in=False) as console:
        page = console.get("/runs/demo-1")
        assert page.status_code == 401
        assert "Sign in" in page.text
        assert "killed" not in page.text
        assert console.get("/now.json").status_code == 401
        assert console.get("/stream").status_code == 401
        form = {"target": "demo-1", "seen": "", "key": "a" * 32}
        assert console.act("stop", form).status_code == 401
        assert console.orders == []


def test_a_code_works_once_and_the_cookie_is_strict(home):
    with open_console(home, signed_in=False) as console:
        code = console.links[0].partition("#")[2]
        assert f"http://{HOST}/enter#" in console.links[0]
        assert console.sign_in("wrong").status_code == 403
        entered = console.sign_in(code)
        cookie = entered.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert code not in cookie
        assert console.get("/").status_code == 200
        console.client.cookies.clear()
        assert console.sign_in(code).status_code == 403
        assert console.get("/").status_code == 401
        assert console.sign_in().status_code == 303, "the console has shown a new code"


def test_wrong_codes_neither_fill_the_terminal_nor_push_out_an_invitation(console):
    page = console.client.post("/invite", data={"who": "grace"}, headers=OWN).text
    code = page.partition("/enter#")[2].partition("<")[0]
    shown = len(console.links)
    console.client.cookies.clear()
    for number in range(CODES_LIMIT + 1):
        assert console.sign_in(f"wrong-{number}").status_code == 403
    assert len(console.links) == shown
    assert console.sign_in(code).status_code == 303
    assert console.sign_in().status_code == 303, "the newest link still works"


def test_signing_out_ends_the_session_also_for_a_copied_cookie(console):
    copied = dict(console.client.cookies)
    assert console.client.post("/leave", data={"x": ""}, headers=OWN).status_code == 303
    console.client.cookies.update(copied)
    assert console.get("/").status_code == 401


def test_reading_can_be_opened_alone(home):
    with open_console(home, signed_in=False, reading_is_open=True) as console:
        console.ledger.set_run("demo-1", state="running")
        assert console.get("/runs/demo-1").status_code == 200
        form = console.form("stop", "demo-1")
        assert form == {}, "no form for people who may not act"
        sent = {"target": "demo-1", "seen": "0.3.completed", "key": "a" * 32}
        assert console.act("stop", sent).status_code == 401
        assert console.orders == []


def test_an_invited_person_acts_under_the_own_name(console):
    page = console.client.post("/invite", data={"who": "grace"}, headers=OWN).text
    code = page.partition("/enter#")[2].partition("<")[0]
    console.client.cookies.clear()
    assert console.sign_in(code).status_code == 303
    assert "Signed in as grace" in console.get("/").text


def test_forwarded_headers_count_only_from_a_configured_proxy(home):
    forwarded = {
        "x-forwarded-for": "6.6.6.6",
        "x-forwarded-proto": "https",
        "host": "console.example",
    }
    with open_console(home, names=("console.example",)) as console:
        form = console.form("cordon", "n1")
        own = {**forwarded, "origin": "https://console.example", "sec-fetch-site": "same-origin"}
        assert console.act("cordon", form, headers=own, why="hot").status_code == 403
    with open_console(home, names=("console.example",), proxies=("testclient",)) as console:
        form = console.form("cordon", "n1")
        assert console.act("cordon", form, headers=own, why="hot").status_code == 303
        told = console.get("/decisions.json").json()["decisions"][0]
        assert told["who"] == "ada from 6.6.6.6"
