// Draws the page's figures, again when the colour scheme changes. A figure is the JSON in its own script element;
// "var(--x)" in it stands for the page's variable of that name.
(() => {
  "use strict";
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const axis = {
    color: "var(--muted)", gridcolor: "var(--grid)", linecolor: "var(--line)", zeroline: false, automargin: true, ticks: "",
    title: { standoff: 8, font: { size: 12 } },
  };
  // What all figures share; a figure's own layout goes first.
  const template = { layout: {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: "var(--font)", size: 12, color: "var(--muted)" }, margin: { l: 8, r: 12, t: 10, b: 8 },
    hoverlabel: { bgcolor: "var(--raised)", bordercolor: "var(--line)", font: { color: "var(--ink)" } },
    xaxis: { ...axis, showline: true }, yaxis: axis,
  } };

  const resolve = (value, style) => {
    if (typeof value === "string")
      return value.includes("var(--") ? value.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim()) : value;
    if (Array.isArray(value)) return value.map((item) => resolve(item, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, style)]));
    return value;
  };

  const draw = (figure) => {
    const plot = figure.querySelector(".plot");
    const style = getComputedStyle(document.documentElement);
    const spec = resolve(JSON.parse(figure.querySelector("script").textContent), style);
    spec.layout.template = resolve(template, style);
    // A finger that scrolls the page past a chart must not zoom it.
    if (touch) spec.layout.dragmode = false;
    const chosen = figure.querySelector('.toggle [aria-pressed="true"]');
    for (const key of (figure.closest(".panels") ?? figure).querySelectorAll('.key[aria-pressed="false"]'))
      for (const at of named(spec.data, key.dataset.name)) spec.data[at].visible = "legendonly";
    Plotly.react(plot, spec.data, spec.layout, { displayModeBar: false, responsive: true, doubleClick: "reset" });
    if (chosen) apply(plot, chosen);
  };

  // The traces of a name, with the band around a line and the markers that belong to it.
  const named = (data, name) => [...data.keys()].filter((at) => data[at].name === name || data[at].legendgroup === name);

  const apply = (plot, button) => Plotly.update(plot, JSON.parse(button.dataset.data), JSON.parse(button.dataset.layout));

  const listen = (figure) => {
    const plot = figure.querySelector(".plot");
    const buttons = [...figure.querySelectorAll(".toggle button")];
    for (const button of buttons)
      button.addEventListener("click", () => {
        for (const other of buttons) other.setAttribute("aria-pressed", other === button);
        apply(plot, button);
      });
  };

  // Panels have one legend, which hides a name in all of them.
  for (const panels of document.querySelectorAll(".panels, figure[data-plot]"))
    for (const key of panels.querySelectorAll(".key"))
      key.addEventListener("click", () => {
        const shown = key.getAttribute("aria-pressed") !== "true";
        key.setAttribute("aria-pressed", shown);
        for (const plot of panels.querySelectorAll(".plot")) {
          const at = named(plot.data ?? [], key.dataset.name);
          if (at.length) Plotly.restyle(plot, { visible: shown ? true : "legendonly" }, at);
        }
      });

  // A click on a head sorts by its column, a second click the other way; cells without a value come last.
  for (const table of document.querySelectorAll("table.sortable"))
    table.tHead.addEventListener("click", ({ target }) => {
      const head = target.closest("th");
      if (!head) return;
      const column = head.cellIndex, up = head.ariaSort !== "ascending", body = table.tBodies[0];
      const numeric = column > 0; // the first column has the names
      const key = ({ cells: { [column]: cell } }) => (numeric ? Number(cell.dataset.value ?? NaN) : cell.firstChild.data.trim());
      const compare = (a, b) => {
        if (!numeric) return (up ? 1 : -1) * a.localeCompare(b, undefined, { numeric: true });
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
        return up ? a - b : b - a;
      };
      const rows = [...body.rows].map((row) => [key(row), row]);
      body.append(...rows.sort((a, b) => compare(a[0], b[0])).map((pair) => pair[1]));
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.ariaSort = up ? "ascending" : "descending";
    });

  // plotly.js is in the page as gzip in base64, which makes the page a third as long.
  const unpack = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  const start = async () => {
    if (typeof DecompressionStream === "undefined") {
      document.getElementById("no-figures").hidden = false;
      return;
    }
    await unpack();
    const figures = [...document.querySelectorAll("figure[data-plot]")];
    for (const figure of figures) { draw(figure); listen(figure); }
    scheme.addEventListener("change", () => figures.forEach(draw));
  };
  start();
})();
