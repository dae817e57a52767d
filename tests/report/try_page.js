// Presses what test_report_page.py's page has, and leaves what is seen then as its only text.
const errors = [], wait = () => new Promise(done => setTimeout(done, 50));
window.onerror = message => errors.push(message);
console.error = (...words) => errors.push(words.join(" "));
addEventListener("load", async () => {
  const plots = () => [...document.querySelectorAll(".js-plotly-plot")];
  const lines = () => plots()[0].data.map(one => [one.name, one.metric, one.x, one.y]);
  const press = async words => { [...document.querySelectorAll("button")].find(one => one.textContent === words).click(); await wait(); };
  const text = id => document.getElementById(id)?.innerText, found = { title: document.title };
  found.charts = [...document.querySelectorAll("h3")].map(one => one.textContent);
  found.drawn = plots().map(one => one.querySelectorAll(".scatterlayer path.js-line").length);
  found.steps = lines(); found.text = plots()[0].data[0].text; found.restarts = plots()[0].layout.shapes.map(one => one.x0);
  found.range = plots()[0].layout.yaxis.range; found.note = document.querySelector(".note").textContent;
  found.tables = ["runs", "samples", "differing", "mixture", "events", "checkpoints"].map(id => text(id));
  const right = one => one.getBoundingClientRect().right;
  found.over = [...document.querySelectorAll("td > span")].filter(one => right(one) > right(one.parentElement)).length;
  found.wide = document.documentElement.scrollWidth - innerWidth;
  await press("tokens"); found.tokens = lines()[0][2];
  await press("log"); found.log = plots()[0].layout.yaxis.type;
  const slider = document.getElementById("smoothing"); slider.value = 0.5; slider.dispatchEvent(new Event("input"));
  found.smooth = lines().filter((_, at) => !plots()[0].data[at].faint)[0][3];
  document.querySelector(".chip").click(); found.left = [...new Set(lines().map(one => one[0]))];
  await press(document.documentElement.classList.contains("dark") ? "light" : "dark"); found.theme = getComputedStyle(document.body).backgroundColor;
  found.network = performance.getEntriesByType("resource").map(one => one.name); found.errors = errors;
  document.body.textContent = ""; document.body.append(Object.assign(document.createElement("pre"), { textContent: "FOUND" + JSON.stringify(found) + "END" }));
});
