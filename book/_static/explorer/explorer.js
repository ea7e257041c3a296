// The attention explorer: hover, focus or move to a word with the arrow keys, and the regions that it attends to light up.
// Data come as scripts (data.js, attention/*.js), because a page that is opened from a disk may not fetch a file.
(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const NAMED = 3; // things in the regions that are named in words, with the sum of their shares

  /** An element with attributes and children. */
  function make(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  /** The weights of a pair, one list of shares for each word. */
  function weightsOf(encoded, words) {
    const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
    const regions = bytes.length / words;
    return Array.from({ length: words }, (_, word) =>
      Array.from(bytes.slice(word * regions, (word + 1) * regions), (weight) => weight / 255));
  }

  const percent = (share) => `${Math.round(100 * share)} %`;
  const captionText = (caption) =>
    caption.gaps[0] + caption.words.map((word, number) => word + caption.gaps[number + 1]).join("");

  class Explorer {
    constructor(root, data) {
      this.root = root;
      this.data = data;
      this.loading = new Set();
      this.base = root.dataset.files; // where images lie, seen from the page
      this.pairs = new Map(data.pairs.map(([image, caption], number) => [`${image} ${caption}`, number]));
      this.state = { model: 0, image: 0, caption: data.captions.findIndex((one) => one.image === 0), word: 0, twin: null };
      this.build();
      this.render();
    }

    // ------------------------------------------------------------------------------ fixed parts

    build() {
      this.model = make("select", { id: "explorer-model" });
      this.data.models.forEach((model, number) => this.model.append(make("option", { value: number }, model.name)));
      this.model.addEventListener("change", () => this.set({ model: Number(this.model.value) }));
      this.about = make("p", { class: "explorer-about", id: "explorer-about" });

      this.images = this.radios("explorer-image", "Image", this.data.images.map((image, number) => ({
        value: number,
        label: this.thumbnail(image, number),
      })), (value) => this.showImage(value));

      this.captions = make("fieldset", { class: "explorer-captions" });
      this.twins = make("fieldset", { class: "explorer-twins" });

      this.picture = make("img", { class: "explorer-picture", width: 384, height: 384 });
      this.overlay = document.createElementNS(SVG, "svg");
      this.overlay.setAttribute("class", "explorer-overlay");
      this.overlay.setAttribute("aria-hidden", "true"); // what it shows is said in words below
      this.words = make("div", { class: "explorer-words", role: "toolbar", "aria-label": "Words of the caption: move with the arrow keys" });
      this.words.addEventListener("keydown", (event) => this.move(event));
      this.said = make("p", { class: "explorer-said", role: "status" });
      this.table = make("table", { class: "explorer-scores" });

      const stage = make("div", { class: "explorer-stage" }, this.picture, this.overlay);
      const controls = make("div", { class: "explorer-controls" },
        make("p", {}, make("label", { for: "explorer-model" }, "Model "), this.model), this.about, this.captions, this.twins);
      this.root.replaceChildren(
        this.images,
        make("div", { class: "explorer-main" }, stage, controls),
        this.words, this.said,
        make("div", { class: "explorer-table", role: "region", tabindex: "0", "aria-label": "Scores of all models" }, this.table));
    }

    thumbnail(image, number) {
      const picture = make("img", { src: this.base + image.file, alt: `Image ${number + 1}: ${image.shows}`, width: 64, height: 64 });
      return [picture];
    }

    /** A set of radio buttons: the browser gives arrow keys, focus and names. */
    radios(name, legend, choices, chosen) {
      const set = make("fieldset", { class: name }, make("legend", {}, legend));
      this.fill(set, name, choices, chosen);
      return set;
    }

    fill(set, name, choices, chosen, current) {
      set.querySelectorAll("label").forEach((label) => label.remove());
      for (const { value, label } of choices) {
        const input = make("input", { type: "radio", name, value });
        input.checked = value === current;
        input.addEventListener("change", () => chosen(value));
        set.append(make("label", {}, input, make("span", {}, ...label)));
      }
    }

    // -------------------------------------------------------------------------------- what is chosen

    set(changes) {
      Object.assign(this.state, changes);
      this.render();
    }

    /** The attention of a model is read when it is chosen, as a script: a page that was opened from a disk may not fetch. */
    load(number) {
      if (this.data.models[number].attention || this.loading.has(number)) return;
      this.loading.add(number);
      const script = make("script", { src: `${this.base}attention/${number}.js` });
      script.addEventListener("load", () => this.render());
      document.head.append(script);
    }

    /** The captions that this image is paired with, as written: its own first. */
    written(image) {
      const known = this.data.captions.map((caption, number) => ({ caption, number }))
        .filter(({ caption, number }) => caption.of === number && this.pairs.has(`${image} ${number}`));
      return [...known.filter(({ caption }) => caption.image === image), ...known.filter(({ caption }) => caption.image !== image)];
    }

    showImage(image) {
      const of = this.data.captions[this.state.caption].of;
      const same = this.pairs.has(`${image} ${of}`) && this.state.caption !== of; // a twin stays beside its near-duplicate
      this.set({ image, caption: same ? this.state.caption : this.written(image)[0].number, word: 0 });
    }

    get pair() {
      return this.pairs.get(`${this.state.image} ${this.state.caption}`);
    }

    move(event) {
      const last = this.data.captions[this.state.caption].words.length - 1;
      const steps = { ArrowRight: this.state.word + 1, ArrowLeft: this.state.word - 1, Home: 0, End: last };
      if (!(event.key in steps)) return;
      event.preventDefault();
      this.light(Math.min(Math.max(steps[event.key], 0), last));
      this.words.querySelectorAll("button")[this.state.word].focus();
    }

    // ---------------------------------------------------------------------------------------- drawing

    render() {
      const { data, state } = this;
      const caption = data.captions[state.caption], image = data.images[state.image], model = data.models[state.model];
      this.model.value = String(state.model);
      this.about.textContent = `Chapter ${model.chapter.slice(0, 2)}, seed ${model.seed}, rsum ${model.rsum.toFixed(1)} on the test split.`;
      this.images.querySelectorAll("input").forEach((input) => { input.checked = Number(input.value) === state.image; });
      this.picture.src = this.base + image.file;
      this.picture.alt = `Image ${state.image + 1}: ${image.shows}`;
      this.renderCaptions(caption);
      this.renderTwins(caption);
      this.renderBoxes(image);
      this.load(state.model);
      this.weights = model.attention ? weightsOf(model.attention[this.pair], caption.words.length) : null;
      this.renderWords(caption);
      this.renderScores(caption);
      this.root.dataset.shown = this.weights ? String(state.model) : "";
      this.light(Math.min(state.word, caption.words.length - 1));
    }

    renderCaptions(caption) {
      const choices = this.written(this.state.image).map(({ caption: one, number }) => ({
        value: number,
        label: [captionText(one), one.image === this.state.image ? "" : ` (of image ${one.image + 1})`],
      }));
      this.refill(this.captions, "Caption", "explorer-caption", choices, (value) => this.set({ caption: value, word: 0 }), caption.of);
    }

    renderTwins(caption) {
      const found = this.data.captions.map((one, number) => ({ one, number })).filter(({ one }) => one.of === caption.of);
      const choices = found.map(({ one, number }) => ({
        value: number,
        label: [one.kind ? `${one.kind}: ${one.said}` : "as written"],
      }));
      this.refill(this.twins, "A word replaced by its twin", "explorer-twin", choices, (value) => this.set({ caption: value }), this.state.caption);
    }

    /** New radio buttons, the focus where it was. */
    refill(set, legend, name, choices, chosen, current) {
      const focused = set.contains(document.activeElement) ? document.activeElement.value : null;
      if (!set.querySelector("legend")) set.append(make("legend", {}, legend));
      this.fill(set, name, choices, chosen, current);
      if (focused !== null) set.querySelector(`input[value="${focused}"]`)?.focus();
    }

    renderBoxes(image) {
      this.overlay.setAttribute("viewBox", `0 0 ${image.side} ${image.side}`);
      this.rectangles = image.boxes.map(([left, top, right, bottom]) => {
        const rectangle = document.createElementNS(SVG, "rect");
        for (const [name, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top })) {
          rectangle.setAttribute(name, value);
        }
        return rectangle;
      });
      this.overlay.replaceChildren(...this.rectangles);
    }

    renderWords(caption) {
      const written = this.data.captions[caption.of];
      const focused = this.words.contains(document.activeElement);
      this.words.replaceChildren(caption.gaps[0]);
      caption.words.forEach((word, number) => {
        const button = make("button", { type: "button" }, word);
        if (word !== written.words[number]) button.classList.add("explorer-replaced");
        button.addEventListener("mouseenter", () => this.light(number));
        button.addEventListener("focus", () => this.light(number));
        button.addEventListener("click", () => this.light(number));
        this.words.append(button, caption.gaps[number + 1]);
      });
      if (focused) this.words.querySelectorAll("button")[Math.min(this.state.word, caption.words.length - 1)].focus();
    }

    /** Light up the regions of a word, and say what they hold. */
    light(word) {
      this.state.word = word;
      const weights = this.weights ? this.weights[word] : this.rectangles.map(() => 0), largest = Math.max(...weights, 1e-6), image = this.data.images[this.state.image];
      this.words.querySelectorAll("button").forEach((button, number) => {
        button.setAttribute("aria-pressed", String(number === word));
        button.tabIndex = number === word ? 0 : -1; // one stop for the whole row
      });
      const strongest = weights.indexOf(Math.max(...weights)), shares = new Map();
      this.rectangles.forEach((rectangle, region) => {
        rectangle.style.setProperty("--share", (weights[region] / largest).toFixed(3));
        rectangle.classList.toggle("explorer-strongest", region === strongest);
        shares.set(image.holds[region], (shares.get(image.holds[region]) ?? 0) + weights[region]);
      });
      const named = [...shares].sort((a, b) => b[1] - a[1]).slice(0, NAMED).filter(([, share]) => share > 0)
        .map(([what, share]) => `${percent(share)} ${what}`);
      const shown = this.data.captions[this.state.caption].words[word];
      const attends = `“${shown}” attends to ${named.length ? named.join(", ") : "no region"}.`;
      this.said.textContent = this.weights ? attends : "";
    }

    renderScores(caption) {
      const twin = caption.kind !== "";
      const before = this.pairs.get(`${this.state.image} ${caption.of}`), now = this.pair;
      const heads = ["Model", "score as written", "rank of the image"];
      if (twin) heads.push(`score with ${caption.said}`, "rank then", "change of the score");
      const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
      const body = make("tbody", {}, ...this.data.models.map((model, number) => {
        const cells = [model.scores[before], model.ranks[before]];
        if (twin) cells.push(model.scores[now], model.ranks[now], model.scores[now] - model.scores[before]);
        const shown = cells.map((value, column) => make("td", {}, this.number(value, column)));
        const row = make("tr", {}, make("th", { scope: "row" }, model.name), ...shown);
        if (number === this.state.model) row.classList.add("explorer-current");
        return row;
      }));
      const truth = (number) => this.data.captions[number].true.includes(this.state.image) ? "true" : "false";
      const about = `“${captionText(this.data.captions[caption.of])}” is ${truth(caption.of)} of image ${this.state.image + 1}`
        + (twin ? `, and with ${caption.said} it is ${truth(this.state.caption)}` : "")
        + `. Ranks are among all ${this.data.candidates} test images; scores of two models do not compare.`;
      this.table.replaceChildren(make("caption", {}, about), head, body);
    }

    /** Ranks as they are, scores with three digits, changes with their sign. */
    number(value, column) {
      if (column === 1 || column === 3) return `${value} of ${this.data.candidates}`;
      const text = Math.abs(value).toPrecision(3);
      return (value < 0 ? "−" : column === 4 ? "+" : "") + text;
    }
  }

  document.addEventListener("DOMContentLoaded", () => {
    const root = document.getElementById("explorer-app");
    if (root && window.attentionExplorer) new Explorer(root, window.attentionExplorer);
  });
})();
