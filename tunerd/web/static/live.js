// Renews what changes on the overview, as often as the daemon looks, until a reader says not to.
"use strict";
(() => {
  const line = document.getElementById("live");
  if (!line) return;
  const said = document.getElementById("renewed");
  const button = document.getElementById("pause");
  const address = `/live?hours=${encodeURIComponent(line.dataset.hours)}`;
  const everyMs = 1000 * Number(line.dataset.every);
  const shown = {};
  let isPaused = false;
  let isAsking = false;
  let renewed = line.dataset.at;

  // What a reader stands in, or has marked, is not taken from under them.
  const isInUse = (place) => {
    const marked = document.getSelection();
    const isMarked = marked && !marked.isCollapsed && place.contains(marked.anchorNode);
    return isMarked || place.contains(document.activeElement);
  };
  const keepOpen = (place, fresh) => {
    const open = [...place.querySelectorAll("details")].map((one) => one.open);
    fresh.querySelectorAll("details").forEach((one, at) => { one.open = open[at] ?? false; });
  };
  const put = (name, text) => {
    const place = document.getElementById(`live-${name}`);
    if (shown[name] === text || isInUse(place)) return;
    shown[name] = text;
    const fresh = document.createElement("div");
    fresh.innerHTML = text;
    keepOpen(place, fresh);
    place.replaceChildren(...fresh.childNodes);
  };
  const show = ({ title, at, parts }) => {
    renewed = at;
    document.title = `${title}: tunerd`;
    for (const [name, text] of Object.entries(parts)) put(name, text);
  };
  const tell = (problem) => {
    said.textContent = problem ? `${problem}: what is shown is from ${renewed}.` : `Updated at ${renewed}.`;
    line.classList.toggle("stale", Boolean(problem));
  };
  const renew = async () => {
    if (isPaused || isAsking || document.hidden) return;
    isAsking = true;
    try {
      const answer = await fetch(address, { headers: { Accept: "application/json" }, redirect: "error" });
      if (!answer.ok) throw new Error(answer.statusText);
      show(await answer.json());
      tell(null);
    } catch {
      tell("tunerd does not answer");
    } finally {
      isAsking = false;
    }
  };
  button.addEventListener("click", () => {
    isPaused = !isPaused;
    button.textContent = isPaused ? "Resume" : "Pause";
    if (isPaused) tell("It waits");
    else renew();
  });
  document.addEventListener("visibilitychange", renew);
  line.hidden = false;
  tell(null);
  setInterval(renew, everyMs);
})();
