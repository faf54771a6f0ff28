"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const inks = {
    light: { ink: "#1d2430", soft: "#5b6472", line: "#d9dde3" },
    dark: { ink: "#e6e9ee", soft: "#a3acb9", line: "#363d47" },
  };

  const models = () => Bokeh.documents.flatMap((doc) => [...doc._all_models.values()]);
  const named = (name) =>
    Bokeh.documents.map((doc) => doc.get_model_by_name(name)).filter((model) => model != null);

  function colours(model, { ink, soft, line }) {
    if (model.type.endsWith("Axis")) {
      return { axis_label_text_color: soft, major_label_text_color: ink, axis_line_color: soft,
               major_tick_line_color: soft };
    }
    if (model.type === "Grid") return { grid_line_color: line };
    if (model.type === "Legend") return { label_text_color: ink };
    if (model.type === "ColorBar") return { major_label_text_color: ink, title_text_color: soft };
    if (model.type === "Title" || model.tags.includes("ink")) return { text_color: ink };
    return null;
  }

  function paint(theme) {
    document.documentElement.dataset.theme = theme;
    document.getElementById("theme").textContent = theme === "dark" ? "light" : "dark";
    for (const model of models()) {
      const values = colours(model, inks[theme]);
      if (values !== null) model.setv(values);
    }
  }

  function choose(settings) {
    for (const [name, values] of Object.entries(settings)) {
      for (const model of named(name)) model.setv(values);
    }
  }

  function offer(files) {
    for (const [name, text] of Object.entries(files)) {
      const link = document.createElement("a");
      link.download = link.textContent = name;
      link.href = URL.createObjectURL(new Blob([text]));
      document.getElementById("downloads").append(link);
    }
  }

  async function start() {
    const preferred = window.matchMedia("(prefers-color-scheme: dark)");
    document.documentElement.dataset.theme = preferred.matches ? "dark" : "light";
    offer(read("files"));
    for (const item of read("items")) await Bokeh.embed.embed_item(item);
    paint(document.documentElement.dataset.theme);
    preferred.addEventListener("change", (event) => paint(event.matches ? "dark" : "light"));
    document.getElementById("theme").addEventListener("click", () => {
      paint(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    });
    for (const [name, options] of Object.entries(read("controls"))) {
      const control = document.getElementById(name);
      control.addEventListener("change", () => choose(options[control.value]));
    }
    document.documentElement.dataset.ready = "yes";
  }

  start();
})();
