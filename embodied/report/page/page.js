"use strict";
const key = (group, column) => {
  const cell = group.rows[0].cells[column];
  const given = cell.dataset.value;
  return given === undefined ? cell.textContent.trim().toLowerCase() : Number(given);
};
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const table = head.closest("table");
    const upwards = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", upwards ? "ascending" : "descending");
    const groups = [...table.tBodies].map((group) => [key(group, head.cellIndex), group]);
    groups.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (upwards ? 1 : -1));
    table.append(...groups.map(([, group]) => group));
  });
}
for (const button of document.querySelectorAll("button.task")) {
  button.addEventListener("click", () => {
    const detail = button.closest("tr").nextElementSibling;
    detail.hidden = !detail.hidden;
    button.setAttribute("aria-expanded", String(!detail.hidden));
  });
}
for (const chip of document.querySelectorAll(".chip")) {
  chip.addEventListener("click", () => {
    const detail = chip.closest("td");
    for (const other of detail.querySelectorAll(".chip")) other.setAttribute("aria-pressed", String(other === chip));
    detail.querySelector(".number-of-start").textContent = chip.textContent;
  });
}
