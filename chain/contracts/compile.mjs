// Compiles src/*.sol into artifacts/*.json of the form { abi, bytecode: { object },
// deployedBytecode: { object } }, and src/v1/*.sol (contracts of existing deployments, not deployed
// any more) into artifacts/v1/*.json without the last part.
// `node compile.mjs --check` recompiles and compares with the committed artifacts; it exits with 1
// if they differ. The artifacts are committed so that the Rust build needs no JavaScript.
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import solc from 'solc';

const here = dirname(fileURLToPath(import.meta.url));
const settings = {
  // All permissioned clients in use support it. Its newest opcode is PUSH0.
  evmVersion: 'shanghai',
  optimizer: { enabled: true, runs: 1000000 },
  viaIR: true,
  // Without the metadata hash only a change of code changes an artifact, not one of a comment.
  metadata: { bytecodeHash: 'none', appendCBOR: false },
  outputSelection: { '*': { '*': ['abi', 'evm.bytecode.object', 'evm.deployedBytecode.object'] } },
};
const check = process.argv.includes('--check');
let different = 0;

function compile(from) {
  const sources = Object.fromEntries(
    readdirSync(join(here, from))
      .filter((file) => file.endsWith('.sol'))
      .sort()
      .map((file) => [file, { content: readFileSync(join(here, from, file), 'utf8') }]),
  );
  const input = { language: 'Solidity', sources, settings };
  const output = JSON.parse(solc.compile(JSON.stringify(input)));
  const findings = (output.errors ?? []).filter((found) => found.severity !== 'info');
  for (const found of findings) console.error(found.formattedMessage);
  if (findings.length > 0) process.exit(1);
  return output.contracts;
}

function write(to, artifact) {
  const text = JSON.stringify(artifact, null, 1) + '\n';
  const path = join(here, to, `${artifact.contractName}.json`);
  if (!check) {
    mkdirSync(join(here, to), { recursive: true });
    writeFileSync(path, text);
    console.log(`${to}/${artifact.contractName}: ${artifact.bytecode.object.length / 2 - 1} bytes`);
    return;
  }
  let committed = '';
  try { committed = readFileSync(path, 'utf8'); } catch { /* reported below */ }
  if (committed !== text) {
    different += 1;
    console.error(`${to}/${artifact.contractName}: artifact differs from its source`);
  }
}

for (const [from, to] of [['src', 'artifacts'], ['src/v1', 'artifacts/v1']]) {
  for (const [file, contracts] of Object.entries(compile(from))) {
    for (const [name, { abi, evm }] of Object.entries(contracts)) {
      if (evm.bytecode.object === '') continue; // abstract
      const artifact = {
        contractName: name,
        sourceName: file,
        abi,
        bytecode: { object: '0x' + evm.bytecode.object },
      };
      // The code hash by which an existing token is recognized.
      if (to === 'artifacts') artifact.deployedBytecode = { object: '0x' + evm.deployedBytecode.object };
      write(to, artifact);
    }
  }
}
const matching = `artifacts match their sources (solc ${solc.version()})`;
if (check) console.log(different === 0 ? matching : `${different} artifact(s) differ`);
process.exit(different === 0 ? 0 : 1);
