"""The notices of the clouds' metadata services, by a real HTTP server that answers in their forms."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.recover.signals.cloud import PERIOD_S, UNSEEN_PERIOD_S, Cloud
from holdfast.recover.signals.facts import CannotSee
from holdfast.testing.clock import FakeClock

FIRMWARE = {
    "aws": ("sys_vendor", "Amazon EC2"),
    "aws, Xen": ("bios_version", "4.11.amazon"),
    "gce": ("product_name", "Google Compute Engine"),
    "azure": ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),
}
GCE = "/computeMetadata/v1/instance"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
SPOT = "/latest/meta-data/spot/instance-action"
MAINTENANCE = "/latest/meta-data/events/maintenance/scheduled"


@pytest.fixture
def service():
    """A metadata service: `pages` by path, and the requests that came."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.came.append(self.path)
            is_named = any(self.headers.get(name) == value for name, value in server.headers)
            body = server.pages.get(self.path)
            code = 401 if not is_named else 404 if body is None else 200
            self.send_response(code)
            self.end_headers()
            self.wfile.write((body or "").encode() if code == 200 else b"")

        def do_PUT(self):
            assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"].isdigit()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"a-token")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.pages, server.came = {}, []
    server.headers = [
        ("X-aws-ec2-metadata-token", "a-token"),
        ("Metadata-Flavor", "Google"),
        ("Metadata", "true"),
    ]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cloud(service, tmp_path, monkeypatch):
    """A function that returns the source of a machine in a cloud."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy would answer for itself

    def of(name):
        file, word = FIRMWARE[name]
        (tmp_path / file).write_text(f"{word}\n")
        return Cloud(tmp_path, f"http://127.0.0.1:{service.server_port}", FakeClock())

    return of


def facts(source):
    return [(one.kind, one.text, one.until_s) for one in source.read()]


@pytest.mark.parametrize("machine", ["aws", "aws, Xen"])
def test_a_spot_instance_of_aws_is_taken_away_at_a_moment(service, cloud, machine):
    source = cloud(machine)
    assert facts(source) == []
    assert source.period_s == PERIOD_S
    service.pages[SPOT] = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
    assert facts(source) == [("preemption", "spot instance: terminate", 1505722920.0)]


def test_scheduled_events_of_aws_are_maintenance_unless_they_are_over(service, cloud):
    event = {
        "NotBefore": "21 Jan 2019 09:00:43 GMT",
        "Code": "system-reboot",
        "Description": "scheduled reboot",
        "State": "active",
    }
    later = {**event, "NotBefore": "22 Jan 2019 09:00:43 GMT", "Code": "instance-stop"}
    done = {**event, "State": "completed", "NotBefore": "20 Jan 2019 09:00:43 GMT"}
    service.pages[MAINTENANCE] = json.dumps([later, event, done])
    assert facts(cloud("aws")) == [("maintenance", "system-reboot: scheduled reboot", 1548061243.0)]


def test_a_preempted_instance_of_gce_has_thirty_seconds_from_the_first_look(service, cloud):
    source = cloud("gce")
    service.pages |= {f"{GCE}/preempted": "FALSE", f"{GCE}/maintenance-event": "NONE"}
    assert facts(source) == []
    service.pages[f"{GCE}/maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert facts(source) == []
    service.pages[f"{GCE}/preempted"] = "TRUE"
    seen_s = source._clock.now_s()
    until_s = seen_s + 30
    assert facts(source) == [("preemption", "the instance is preempted", until_s)]
    source._clock.advance(10)
    assert facts(source) == [("preemption", "the instance is preempted", until_s)]


def test_host_maintenance_of_gce_stops_a_machine_with_gpus_after_an_hour(service, cloud):
    source = cloud("gce")
    service.pages[f"{GCE}/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    ((kind, _, until_s),) = facts(source)
    assert (kind, until_s) == ("maintenance", source._clock.now_s() + 3600)


def test_azures_events_of_this_machine_count_and_a_freeze_does_not(service, cloud):
    event = {
        "EventId": "1",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["gpu_7"],
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
        "Description": "spot eviction",
    }
    service.pages |= {NAME: "gpu_7", EVENTS: '{"DocumentIncarnation": 1, "Events": []}'}
    source = cloud("azure")
    assert facts(source) == []
    others = [
        {**event, "Resources": ["gpu_8"], "EventType": "Reboot"},
        {**event, "EventType": "Freeze"},
    ]
    service.pages[EVENTS] = json.dumps({"Events": others})
    assert facts(source) == []
    begun = {**event, "EventType": "Redeploy", "EventStatus": "Started", "NotBefore": ""}
    service.pages[EVENTS] = json.dumps({"Events": [*others, event, begun]})
    assert sorted(facts(source)) == [
        ("maintenance", "Redeploy: spot eviction", None),
        ("preemption", "Preempt: spot eviction", 1474309787.0),
    ]


def test_a_host_in_no_cloud_sends_no_request(service, tmp_path):
    (tmp_path / "sys_vendor").write_text("Supermicro\n")
    source = Cloud(tmp_path, f"http://127.0.0.1:{service.server_port}")
    with pytest.raises(CannotSee, match="not in AWS, GCE or Azure"):
        source.read()
    assert service.came == []


def test_a_service_that_refuses_or_answers_nonsense_says_nothing_of_the_machine(service, cloud):
    source = cloud("azure")
    service.headers.clear()
    with pytest.raises(CannotSee, match="401"):
        source.read()
    assert source.period_s == UNSEEN_PERIOD_S  # a firewall, as a rule
    service.headers.append(("Metadata", "true"))
    service.pages[EVENTS] = "<html>"
    with pytest.raises(CannotSee, match="not JSON"):
        source.read()


def test_a_service_that_is_not_there_is_named(tmp_path):
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    with pytest.raises(CannotSee, match=r"127\.0\.0\.1:1/latest/api/token: .*refused"):
        Cloud(tmp_path, "http://127.0.0.1:1").read()
