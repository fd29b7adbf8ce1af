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
    let offset = 0;
    const show = ({ text, step, steps, done_ratio: ratio }) => {
      const count = step && steps ? `[${step}/${steps}] ` : "";
      line.textContent = count + text + (ratio === null ? "" : ` ${Math.round(ratio * 100)} %`);
    };
    const follow = async () => {
      try {
        const answer = await fetch(`/api/jobs/${line.dataset.job}/events?offset=${offset}`, { redirect: "error" });
        if (!answer.ok) throw new Error(answer.statusText);
        const told = await answer.json();
        offset = told.offset;
        told.events.filter((one) => one.event === "progress").forEach(show);
        if (told.is_over) location.reload();
        else setTimeout(follow, 500);
      } catch {
        line.textContent = "tunerd does not answer; trying again every few seconds";
        offset = 0; // how far it is shall stand there again, though nothing new is told
        setTimeout(follow, 3000);
      }
    };
    follow();
  });
})();
