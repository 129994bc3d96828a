"use strict";
(() => {
  const attempts = [...document.querySelectorAll(".attempt")];
  // A link to an attempt opens it.
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.matches(".attempt")) {
      target.hidden = false;
      target.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", open);
  open();
  // What a pointer or the focus rests on is told below the graph.
  const told = document.getElementById("told");
  const graph = document.querySelector(".graph");
  if (graph && told) {
    const rest = "Point at a vertex, or move to it with Tab, to read about it here.";
    const tell = (event) => {
      const vertex = event.target.closest("a");
      told.textContent = vertex ? vertex.querySelector("title").textContent : rest;
    };
    graph.addEventListener("pointerover", tell);
    graph.addEventListener("focusin", tell);
    told.textContent = rest;
  }
  // Search and filter; without JavaScript all attempts simply stand there.
  const list = document.querySelector(".attempts");
  if (!list) return;
  const tools = document.createElement("div");
  tools.className = "tools";
  const search = Object.assign(document.createElement("input"), { type: "search", placeholder: "Find in attempts" });
  search.setAttribute("aria-label", "Find in attempts");
  const status = document.createElement("select");
  status.setAttribute("aria-label", "Status");
  status.append(new Option("every status", ""));
  for (const name of new Set(attempts.map((item) => item.dataset.status))) status.append(new Option(name, name));
  const all = Object.assign(document.createElement("button"), { type: "button", textContent: "Open all" });
  const shown = document.createElement("span");
  shown.setAttribute("role", "status");
  shown.className = "muted";
  const text = new Map();
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const item of attempts) {
      if (words.length && !text.has(item)) text.set(item, item.textContent.toLowerCase());
      const fits = words.every((word) => text.get(item).includes(word)) && (!status.value || status.value === item.dataset.status);
      item.hidden = !fits;
      count += fits;
    }
    shown.textContent = count === attempts.length ? "" : `${count} of ${attempts.length}`;
  };
  search.addEventListener("input", filter);
  status.addEventListener("change", filter);
  all.addEventListener("click", () => {
    const opening = all.textContent === "Open all";
    for (const item of attempts) if (!item.hidden) item.open = opening;
    all.textContent = opening ? "Close all" : "Open all";
  });
  tools.append(search, status, all, shown);
  list.before(tools);
})();
