// Keeps the theme from page to page, and follows a job until it is over.
"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const kept = localStorage.getItem("theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
    new MutationObserver(() => {
      if (root.dataset.theme) localStorage.setItem("theme", root.dataset.theme);
    }).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
  } catch {
    // A browser that keeps nothing follows the system.
  }
  document.addEventListener("DOMContentLoaded", () => {
    const line = document.getElementById("progress");
    if (!line) return;
    const follow = () => {
      const events = new EventSource(`/api/jobs/${line.dataset.job}/events`);
      events.addEventListener("progress", (event) => {
        const { text, step, steps, done_ratio: ratio } = JSON.parse(event.data);
        const count = step && steps ? `[${step}/${steps}] ` : "";
        line.textContent = count + text + (ratio === null ? "" : ` ${Math.round(ratio * 100)} %`);
      });
      events.addEventListener("end", () => {
        events.close();
        location.reload();
      });
      // A browser asks again by itself where the line broke, but not where it was refused.
      events.addEventListener("error", () => {
        line.textContent = "tunerd does not answer; it is asked again every few seconds";
        if (events.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
      });
    };
    follow();
  });
})();
