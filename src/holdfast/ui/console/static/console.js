"use strict";
// Pages are whole without this script. With it they follow the run: one stream a browser, at most two fetches a second.

const ROOT = document.documentElement;
const LIVE = document.getElementById("live");
const CHANNEL = new BroadcastChannel("holdfast");
const WAIT_MS = 500;
const RETRY_MS = 3000;
const NO_CONNECTION = "no connection";
const NO_LEDGER = "the ledger does not answer";

function saved(name) { try { return localStorage.getItem(name); } catch { return null; } }
function save(name, value) { try { localStorage.setItem(name, value); } catch { /* a private window */ } }

// Colours.
const theme = document.getElementById("theme");
if (saved("theme")) ROOT.dataset.theme = saved("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const isDark = ROOT.dataset.theme ? ROOT.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  ROOT.dataset.theme = isDark ? "light" : "dark";
  save("theme", ROOT.dataset.theme);
  document.dispatchEvent(new Event("holdfast:theme"));
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("holdfast:theme")));

// Times: local, with UTC and the age in the title.
function age(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return "";
}
function showTimes() {
  for (const one of document.querySelectorAll("time[data-at]")) {
    const at = Number(one.dataset.at);
    const then = new Date(at * 1000);
    const old = age(Date.now() / 1000 - at);
    one.title = then.toISOString();
    one.textContent = old || then.toLocaleString();
  }
}
showTimes();
setInterval(showTimes, 1000);

// Signing in: the code stands behind the # and is never part of a request's address.
const form = document.getElementById("enter");
if (form && location.hash.length > 8) {
  form.elements.code.value = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  form.submit();
}

// Fragments.
// Focus and sideways scrolling outlive a new fragment: who uses the keyboard or a phone is not sent back to the beginning.
function place(part) {
  const reached = "a, button, input, select, [tabindex]";
  const wide = ".scroll, pre";
  const same = (one) => [one.tagName, one.getAttribute("href"), one.getAttribute("aria-label")].join(" ");
  const focus = part.contains(document.activeElement) ? document.activeElement : null;
  const number = focus ? [...part.querySelectorAll(reached)].filter((one) => same(one) === same(focus)).indexOf(focus) : -1;
  const lefts = [...part.querySelectorAll(wide)].map((one) => one.scrollLeft);
  return () => {
    part.querySelectorAll(wide).forEach((one, at) => { one.scrollLeft = lefts[at] || 0; });
    if (focus) [...part.querySelectorAll(reached)].filter((one) => same(one) === same(focus))[number]?.focus({ preventScroll: true });
  };
}
let waiting = null;
let isFetching = false;
async function refresh() {
  waiting = null;
  if (isFetching) { ask(); return; }
  isFetching = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "error" });
    if (answer.status === 503) { down(NO_LEDGER); setTimeout(ask, RETRY_MS); return; }
    if (!answer.ok) throw new Error(String(answer.status));
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const there of document.querySelectorAll("[data-live]")) {
      const here = page.getElementById(there.id);
      if (here && here.innerHTML !== there.innerHTML) {
        const back = place(there);
        there.replaceChildren(...here.childNodes);
        back();
        there.classList.remove("fresh");
        void there.offsetWidth;
        there.classList.add("fresh");
      }
    }
    LIVE.replaceChildren(...page.getElementById("live").childNodes);
    showTimes();
    document.dispatchEvent(new Event("holdfast:fresh"));
    down("");
  } catch { down(NO_CONNECTION); } finally { isFetching = false; }
}
function ask() { if (waiting === null) waiting = setTimeout(refresh, WAIT_MS); }
function down(why) {
  const line = LIVE.closest(".asof");
  if ((line.dataset.down || "") === why) return;
  line.dataset.down = why;
  line.classList.toggle("down", why !== "");
  LIVE.querySelector(".why")?.remove();
  if (!why) { ask(); return; }
  const note = document.createElement("span");
  note.className = "why";
  note.textContent = ` (${why})`;
  LIVE.append(note);
}
// A page that could not be read from the ledger.
async function again() {
  try {
    const answer = await fetch(location.href);
    if (answer.status !== 503) { location.reload(); return; }
  } catch { /* the console itself is away */ }
  setTimeout(again, RETRY_MS);
}
if (document.querySelector("[data-retry]")) setTimeout(again, RETRY_MS);

// One stream a browser. The window that holds the lock listens for all.
const watched = document.body.dataset.watch.split(" ").filter(Boolean);
function heard(message) {
  if (message.down !== undefined) { down(message.down); return; }
  const all = message.kind === "snapshot" || watched.includes("*");
  if (all || message.targets.some((one) => watched.includes(one))) ask();
}
CHANNEL.onmessage = (event) => heard(event.data);
function tell(message) { CHANNEL.postMessage(message); heard(message); }
function listen() {
  return new Promise((leave) => {
    const last = saved("last") || "";
    const stream = new EventSource(last ? `/stream?last=${encodeURIComponent(last)}` : "/stream");
    const on = (kind) => (event) => { save("last", event.lastEventId); tell({ kind, targets: JSON.parse(event.data).targets }); };
    stream.addEventListener("changed", on("changed"));
    stream.addEventListener("snapshot", on("snapshot"));
    stream.addEventListener("ledger", (event) => tell({ down: JSON.parse(event.data).trouble ? NO_LEDGER : "" }));
    stream.onopen = () => tell({ down: "" });
    stream.onerror = () => tell({ down: NO_CONNECTION });
    const hidden = () => { if (document.hidden) { document.removeEventListener("visibilitychange", hidden); stream.close(); leave(); } };
    document.addEventListener("visibilitychange", hidden);
  });
}
async function follow() {
  if (!watched.length || document.hidden) return;
  if (navigator.locks) await navigator.locks.request("holdfast-stream", listen); else await listen();
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) { ask(); follow(); } });
follow();
