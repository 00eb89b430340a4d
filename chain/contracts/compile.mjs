// Compiles src/*.sol into artifacts/*.json of the form { abi, bytecode: { object } }.
// `node compile.mjs --check` recompiles and compares with the committed artifacts; it exits with 1
// if they differ. The artifacts are committed so that the Rust build needs no JavaScript.
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import solc from 'solc';

const here = dirname(fileURLToPath(import.meta.url));
const sources = Object.fromEntries(
  readdirSync(join(here, 'src'))
    .filter((file) => file.endsWith('.sol'))
    .sort()
    .map((file) => [file, { content: readFileSync(join(here, 'src', file), 'utf8') }]),
);
const input = {
  language: 'Solidity',
  sources,
  settings: {
    // All permissioned clients in use support it. Its newest opcode is PUSH0.
    evmVersion: 'shanghai',
    optimizer: { enabled: true, runs: 1000000 },
    viaIR: true,
    // Without the metadata hash only a change of code changes an artifact, not one of a comment.
    metadata: { bytecodeHash: 'none', appendCBOR: false },
    outputSelection: { '*': { '*': ['abi', 'evm.bytecode.object'] } },
  },
};
const output = JSON.parse(solc.compile(JSON.stringify(input)));
const findings = (output.errors ?? []).filter((found) => found.severity !== 'info');
for (const found of findings) console.error(found.formattedMessage);
if (findings.length > 0) process.exit(1);

const check = process.argv.includes('--check');
let different = 0;
mkdirSync(join(here, 'artifacts'), { recursive: true });
for (const [file, contracts] of Object.entries(output.contracts)) {
  for (const [name, contract] of Object.entries(contracts)) {
    if (contract.evm.bytecode.object === '') continue; // abstract
    const artifact = {
      contractName: name,
      sourceName: file,
      abi: contract.abi,
      bytecode: { object: '0x' + contract.evm.bytecode.object },
    };
    const text = JSON.stringify(artifact, null, 1) + '\n';
    const path = join(here, 'artifacts', `${name}.json`);
    if (!check) {
      writeFileSync(path, text);
      console.log(`${name}: ${contract.evm.bytecode.object.length / 2} bytes`);
      continue;
    }
    let committed = '';
    try { committed = readFileSync(path, 'utf8'); } catch { /* reported below */ }
    if (committed !== text) { different += 1; console.error(`${name}: artifact differs from its source`); }
  }
}
const matching = `artifacts match their sources (solc ${solc.version()})`;
if (check) console.log(different === 0 ? matching : `${different} artifact(s) differ`);
process.exit(different === 0 ? 0 : 1);
