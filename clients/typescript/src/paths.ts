/** Default paths of the daemon's socket, in the order of docs/protocol.md (Transport). */

import { existsSync, lstatSync, statSync } from "node:fs";
import { dirname } from "node:path";
import { geteuid } from "node:process";

import { PermissionDenied } from "./errors.js";

const SYSTEM_FOLDER = "/run/inferd";
const SYSTEM_SOCKET = `${SYSTEM_FOLDER}/inferd.sock`;

/**
 * Return the socket to which a client without a path connects: that of the environment, or the first that exists
 * in the user's runtime folder, of the system, and in the user's private folder.
 */
export function socketPath(environment: NodeJS.ProcessEnv = process.env): string {
  if (environment.INFERD_SOCKET) return environment.INFERD_SOCKET;
  const runtime = environment.XDG_RUNTIME_DIR || ownRuntimeFolder();
  const own = runtime && `${runtime}/inferd/inferd.sock`;
  const ownPrivate = `${privateFolder()}/inferd.sock`;
  if (own && existsSync(own)) return own;
  if (existsSync(SYSTEM_SOCKET)) return SYSTEM_SOCKET;
  if (existsSync(ownPrivate) && isPrivate(ownPrivate)) return ownPrivate;
  // None exists: a daemon would listen here. Root can make the system's folder.
  return own || (isFolder(SYSTEM_FOLDER) || geteuid!() === 0 ? SYSTEM_SOCKET : ownPrivate);
}

/**
 * Check the user's private folder before a connection to `path`, if the socket is in it. Any user can make that
 * folder. Node.js does not show the user at the other end of a socket; in a folder of this user alone, in a /tmp where
 * only owners may rename files, no other user can make one.
 *
 * Throws `PermissionDenied`, and the error of Node.js if there is no such folder.
 */
export function checkSocketFolder(path: string): void {
  const folder = privateFolder();
  if (dirname(path) !== folder) return;
  const found = lstatSync(folder); // a link leads to a folder that another user may change
  const hint = "set INFERD_SOCKET or XDG_RUNTIME_DIR to a path that only you can change";
  if (!found.isDirectory()) throw new PermissionDenied(`${folder} is not a folder`, { hint });
  if (found.uid !== geteuid!()) {
    throw new PermissionDenied(`${folder} belongs to user ${found.uid}`, { hint });
  }
  if (found.mode & 0o077) {
    const mode = (found.mode & 0o7777).toString(8).padStart(4, "0");
    throw new PermissionDenied(`${folder} is open to other users (mode ${mode})`, {
      hint: `remove it: \`rm -r ${folder}\``,
    });
  }
}

function privateFolder(): string {
  return `/tmp/inferd-${geteuid!()}`;
}

function isPrivate(path: string): boolean {
  try {
    checkSocketFolder(path);
    return true;
  } catch {
    return false;
  }
}

function ownRuntimeFolder(): string | undefined {
  const folder = `/run/user/${geteuid!()}`;
  return isFolder(folder) ? folder : undefined;
}

function isFolder(path: string): boolean {
  return statSync(path, { throwIfNoEntry: false })?.isDirectory() ?? false;
}
