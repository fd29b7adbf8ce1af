// Closes the tables behind the charts, opens them to be printed, and switches themes.
"use strict";
(() => {
  const root = document.documentElement;
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const showTheme = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to the light theme" : "Switch to the dark theme");
  };
  button.removeAttribute("aria-pressed");
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);

  let before = null;
  window.addEventListener("beforeprint", () => {
    const closed = [...document.querySelectorAll("details:not([open])")];
    before = { theme: root.dataset.theme, closed };
    for (const one of closed) one.open = true;
    root.dataset.theme = "light";
  });
  window.addEventListener("afterprint", () => {
    if (!before) return;
    for (const one of before.closed) one.open = false;
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    before = null;
  });

  showTheme();
  for (const one of document.querySelectorAll("details.data")) one.open = false;
})();
