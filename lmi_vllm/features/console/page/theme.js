// Before the first paint, so that nothing flashes: what was chosen on an earlier visit.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("lmi-console-theme");
  } catch {
    // storage may be forbidden; the system's theme it is
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
