// Draws the charts in the colours of the theme, closes the tables behind them, and switches themes.
"use strict";
(() => {
  const root = document.documentElement;
  const source = document.getElementById("figures");
  const figures = source ? JSON.parse(source.textContent) : {};
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const PRINT_WIDTH = 660;

  // "@ink" and "@ink/0.4" are colours of the theme.
  const colour = (name) => {
    const [key, alpha] = name.slice(1).split("/");
    const value = getComputedStyle(root).getPropertyValue(`--${key}`).trim();
    if (!alpha || !/^#[0-9a-f]{6}$/i.test(value)) return value;
    const parts = [1, 3, 5].map((at) => parseInt(value.slice(at, at + 2), 16));
    return `rgba(${parts.join(",")},${alpha})`;
  };
  const themed = (value) => {
    if (typeof value === "string") return /^@[a-z]/.test(value) ? colour(value) : value;
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, themed(one)]));
    }
    return value;
  };
  const draw = (width) => {
    const font = getComputedStyle(document.body).fontFamily;
    for (const box of document.querySelectorAll("[data-figure]")) {
      const { data, layout } = themed(figures[box.dataset.figure]);
      layout.font.family = font;
      if (width) layout.width = width;
      Plotly.react(box, data, layout, { displayModeBar: false, responsive: !width })
        .then(() => { box.dataset.drawn = "yes"; });
    }
  };

  document.addEventListener("figures", (event) => {
    Object.assign(figures, event.detail);
    draw();
  });

  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const showTheme = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to the light theme" : "Switch to the dark theme");
    draw();
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
    draw(PRINT_WIDTH);
  });
  window.addEventListener("afterprint", () => {
    if (!before) return;
    for (const one of before.closed) one.open = false;
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    before = null;
    draw();
  });

  showTheme();
  for (const one of document.querySelectorAll("details.data")) one.open = false;
  root.dataset.drawn = "yes";
})();
