// The chats whose answers this tab was reading when it was reloaded or showed another chat. Only such
// answers go on by themselves: another one may have been stopped on purpose.

const NAME = "inferd-unfinished";
const CHATS_MAX = 20;

function ids() {
  try {
    const found = JSON.parse(sessionStorage.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found.filter((id) => typeof id === "string") : [];
  } catch {
    return [];
  }
}

function store(found) {
  try {
    sessionStorage.setItem(NAME, JSON.stringify(found.slice(-CHATS_MAX)));
  } catch (error) {
    console.warn(`the unfinished answers were not stored: ${error.message}`);
  }
}

export const unfinished = {
  has: (id) => ids().includes(id),
  add: (id) => store([...ids().filter((each) => each !== id), id]),
  delete: (id) => store(ids().filter((each) => each !== id)),
};
