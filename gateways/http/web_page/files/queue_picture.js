// A picture of the queue: the turns that are computed, those ahead of the user's, and its own.

import { element } from "./elements.js";

const BOXES_MAX = 12;

const turns = (number) => `${number} ${number === 1 ? "request" : "requests"}`;

// Returns the place of an own turn: the numbers of turns computed, ahead, and behind. `statistics` are
// those of its model, of all users; they may be half a second older or newer than the turn.
export function placeOf(turn, statistics) {
  const isRunning = turn.state === "running";
  const waiting = statistics ? statistics.waiting + statistics.parked : 0;
  const ahead = isRunning ? 0 : Math.max(0, (turn.position ?? 1) - 1);
  return {
    isRunning,
    running: Math.max(0, (statistics?.running ?? 0) - (isRunning ? 1 : 0)),
    ahead,
    behind: Math.max(0, waiting - ahead - (isRunning ? 0 : 1)),
    startsIn: isRunning ? 0 : turn.starts_in_s,
  };
}

// Returns the place in words, for screen readers and for those who read the picture's legend.
export function placeInWords({ isRunning, running, ahead, behind, startsIn }) {
  if (isRunning) {
    return `Your request is being computed${running ? `, beside ${turns(running)}` : ""}.`;
  }
  const wait = startsIn ? `, about ${startsIn < 10 ? startsIn.toFixed(1) : Math.round(startsIn)} s to go` : "";
  const next = ahead ? `${turns(ahead)} ahead of yours` : "Yours is next";
  const others = [running && `${running} being computed`, behind && `${behind} behind it`].filter(Boolean);
  return `${next}${wait}${others.length ? ` (${others.join(", ")})` : ""}.`;
}

// Returns the boxes of the picture, in the order of the computation; `number` stands for several.
export function boxesOf({ isRunning, running, ahead, behind }) {
  const own = { kind: isRunning ? "own computed" : "own", number: 1 };
  const groups = [["computed", running], ["ahead", ahead], ["behind", behind]];
  const room = Math.floor((BOXES_MAX - 1) / groups.length);
  const boxes = groups.map(([kind, count]) => {
    const single = count > room ? room - 1 : count;
    const each = Array.from({ length: single }, () => ({ kind, number: 1 }));
    return count > room ? [...each, { kind, number: count - single }] : each;
  });
  return [...boxes[0], ...boxes[1], own, ...boxes[2]];
}

export function drawQueue(place) {
  const boxes = boxesOf(place).map(({ kind, number }) => element("span", {
    className: `box ${kind}`, textContent: kind.startsWith("own") ? "you" : number > 1 ? `+${number}` : "",
  }));
  return element("div", { className: "queue-picture" },
    element("div", { className: "boxes", "aria-hidden": "true" }, ...boxes),
    element("p", { className: "note", textContent: placeInWords(place) }));
}
