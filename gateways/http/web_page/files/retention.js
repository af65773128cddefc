// The time that chats stay, in words. Pure functions.

const DAY_S = 86_400;
const SOON_S = 2 * DAY_S; // the list of chats shows the times below this
const UNITS = [["day", DAY_S], ["hour", 3600], ["minute", 60]];
const TITLES_SHOWN = 3;
const CAUSES = {
  age: "because they were not used for too long",
  sessions: "because there were too many chats on this machine",
  memory: "because the chats on this machine took too much memory",
};

const counted = (number, unit) => `${number} ${unit}${number === 1 ? "" : "s"}`;

// Returns a length of time in its largest unit, rounded down: no chat is deleted earlier than said.
export function inWords(seconds) {
  const [unit, length] = UNITS.find(([, each]) => seconds >= each) ?? ["", 0];
  return unit ? counted(Math.floor(seconds / length), unit) : "less than a minute";
}

// Returns the sentence about the open chat. Times are seconds since 1970.
export function fateOf({ kept, delete_at: deleteAt }, now) {
  if (kept) return "Kept until you delete it.";
  return deleteAt ? `Deleted in ${inWords(deleteAt - now)}, unless you use or keep it.` : "";
}

// Returns the note of a chat in the list. It is empty unless something is to be known about the chat.
export function noteOf({ kept, state, interrupted, delete_at: deleteAt }, now) {
  if (state !== "dormant") return "Answering…";
  if (interrupted) return "Not complete";
  if (kept) return "Kept";
  return deleteAt && deleteAt - now < SOON_S ? `Deleted in ${inWords(deleteAt - now)}` : "";
}

// Returns the sentence about all chats, from the daemon's bounds.
export function rulesOf({ sessions, sessions_max: most, seconds_max: seconds }) {
  const age = seconds ? `Chats that nobody keeps are deleted ${inWords(seconds)} after their last use, or earlier` : "Chats that nobody keeps are deleted";
  return `${age} when this machine has more than ${most} (now ${sessions}).`;
}

// Returns a sentence for each cause for which the daemon has deleted chats by itself.
export function lossesOf(deletions) {
  return Object.entries(CAUSES).flatMap(([reason, cause]) => {
    const chats = deletions.filter((each) => each.reason === reason);
    if (!chats.length) return [];
    const names = chats.slice(0, TITLES_SHOWN).map((chat) => `“${chat.title || "Chat"}”`).join(", ");
    const more = chats.length > TITLES_SHOWN ? ` and ${chats.length - TITLES_SHOWN} more` : "";
    return [`The daemon deleted ${names}${more} ${cause}.`];
  });
}
