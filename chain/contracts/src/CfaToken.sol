// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IdentityRegistry} from "./IdentityRegistry.sol";
import {ENFORCE, FREEZE, ISSUE, MINT, MOVE, PAUSE, REDEEM, Roles, SETTLE, TERMS} from "./Roles.sol";

/// Units of one issue, or the money claim CFA-RUB. Names follow ERC-3643; the terms follow CMTAT.
///
/// Holders are addresses on the allow-list. A holder with a key can transfer own units. There are
/// no allowances. All other changes need a role (`Roles.sol`).
///
/// Rules of a transfer: the sender is not frozen and has enough units that are not frozen; the
/// receiver is on the allow-list and not frozen; the token is not paused. `burnOnce` has the rules
/// of the sender. `forcedTransfer` (court decision, inheritance, lost access) and `burn` (end of an
/// issue, replacement of the token) check only the balance, and `forcedTransfer` that the receiver
/// is on the allow-list. Both unfreeze the units that they take. `payHolder` pays a frozen receiver
/// too: the money stays frozen there.
///
/// `mintOnce`, `burnOnce` and `forcedTransfer` accept each operation id once. The contracts that
/// call `mint`, `burn` and `payHolder` accept each of their own operations once.
///
/// No part of the code depends on the constructor's arguments, so all tokens of a version have one
/// code hash.
///
/// Cost: a holder is one storage slot. A transfer reads and writes two of them and reads one slot
/// of settings.
contract CfaToken is Roles {
    struct Holder {
        uint128 balance;
        uint120 frozenUnits;
        bool frozen;
    }

    string public name;
    string public symbol;
    uint256 public totalSupply;
    // one slot: every transfer reads the first two
    IdentityRegistry public identityRegistry;
    bool public paused;
    uint8 public decimals;
    mapping(address account => Holder) private holders;
    mapping(bytes32 operationId => bool) public operationAccepted;
    bytes32 private documentHash;
    bytes32 private termsHash;
    string private documentUri;

    event Transfer(address indexed from, address indexed to, uint256 value);
    event ForcedTransfer(
        bytes32 indexed operationId, address indexed from, address indexed to, uint256 value, bytes32 reasonHash
    );
    event AddressFrozen(address indexed account, bool indexed frozen, address indexed agent);
    event TokensFrozen(address indexed account, uint256 amount);
    event TokensUnfrozen(address indexed account, uint256 amount);
    event Paused(address agent);
    event Unpaused(address agent);
    event IdentityRegistryAdded(address indexed registry);
    event TermsSet(bytes32 indexed documentHash, bytes32 indexed termsHash, string documentUri);

    error InsufficientBalance(address account, uint256 free, uint256 wanted);
    error NotVerified(address account);
    error Frozen(address account);
    error TokenPaused();
    error TokenNotPaused();
    error AmountTooLarge(uint256 amount);
    error OperationAlreadyAccepted(bytes32 operationId);
    error NoReason();
    error NoDocument();
    error TermsAlreadySet();

    constructor(
        string memory name_,
        string memory symbol_,
        uint8 decimals_,
        IdentityRegistry registry,
        address owner_,
        address[] memory accounts,
        uint256[] memory roles,
        bytes32 documentHash_,
        bytes32 termsHash_,
        string memory documentUri_
    ) Roles(owner_, accounts, roles) {
        name = name_;
        symbol = symbol_;
        decimals = decimals_;
        identityRegistry = registry;
        emit IdentityRegistryAdded(address(registry));
        if (documentHash_ != 0) _setTerms(documentHash_, termsHash_, documentUri_);
    }

    // ---- reads

    function balanceOf(address account) external view returns (uint256) {
        return holders[account].balance;
    }

    function getFrozenTokens(address account) external view returns (uint256) {
        return holders[account].frozenUnits;
    }

    function isFrozen(address account) external view returns (bool) {
        return holders[account].frozen;
    }

    /// Whether a transfer with these arguments would pass now. Runs the same checks.
    function canTransfer(address from, address to, uint256 amount) external view returns (bool) {
        Holder storage source = holders[from];
        if (paused || source.frozen || holders[to].frozen) return false;
        if (uint256(source.balance) - source.frozenUnits < amount) return false;
        return identityRegistry.isVerified(to);
    }

    /// Hash of the issue decision, hash of the terms as the platform has recorded them, and where
    /// the decision is published. All zero before they are set.
    function terms() external view returns (bytes32 document, bytes32 recorded, string memory uri) {
        return (documentHash, termsHash, documentUri);
    }

    // ---- transfers

    function transfer(address to, uint256 amount) external returns (bool) {
        _checkMove(to);
        _move(msg.sender, to, amount);
        return true;
    }

    /// A transfer ordered through the platform, under the rules of a transfer.
    function operatorTransfer(address from, address to, uint256 amount) external onlyRole(SETTLE) returns (bool) {
        _checkMove(to);
        _move(from, to, amount);
        return true;
    }

    /// The money leg of a trade: price to the seller, fee to the fee account, in one call.
    function operatorPay(address from, address to, uint256 amount, address feeTo, uint256 fee)
        external
        onlyRole(SETTLE)
    {
        _checkMove(to);
        _move(from, to, amount);
        if (fee != 0) _move(from, feeTo, fee);
    }

    /// A payment of a distribution. The receiver may be frozen, the payer and its units may not.
    /// Possible while the token is paused.
    function payHolder(address from, address to, uint256 amount) external onlyRole(REDEEM) {
        if (!identityRegistry.isVerified(to)) revert NotVerified(to);
        _checkFree(from, amount);
        unchecked {
            holders[from].balance -= uint128(amount);
            holders[to].balance += uint128(amount);
        }
        emit Transfer(from, to, amount);
    }

    /// Enforcement: transfers despite freezes and pause. Takes frozen units last and unfreezes
    /// them. `reasonHash` is the hash of the document that orders it.
    function forcedTransfer(bytes32 operationId, address from, address to, uint256 amount, bytes32 reasonHash)
        external
        onlyRole(ENFORCE)
    {
        if (reasonHash == 0) revert NoReason();
        _accept(operationId);
        if (!identityRegistry.isVerified(to)) revert NotVerified(to);
        _take(from, amount);
        unchecked {
            holders[to].balance += uint128(amount);
        }
        emit Transfer(from, to, amount);
        emit ForcedTransfer(operationId, from, to, amount, reasonHash);
    }

    // ---- supply

    function mintOnce(bytes32 operationId, address to, uint256 amount) external onlyRole(MINT) {
        _accept(operationId);
        _mint(to, amount);
    }

    function mint(address to, uint256 amount) external onlyRole(ISSUE) {
        _mint(to, amount);
    }

    function burnOnce(bytes32 operationId, address from, uint256 amount) external onlyRole(MINT) {
        _accept(operationId);
        if (paused) revert TokenPaused();
        _checkFree(from, amount);
        _burn(from, amount);
    }

    /// Despite freezes and pause.
    function burn(address from, uint256 amount) external onlyRole(REDEEM) {
        _burn(from, amount);
    }

    /// Gives a holder of a replaced token the same units, with their freezes. The caller burns them
    /// there (`Migration.sol`). The token is paused until all holders are moved.
    function takeOver(address account, uint256 amount, uint256 frozenUnits, bool frozen) external onlyRole(MOVE) {
        if (!paused) revert TokenNotPaused();
        if (frozenUnits > amount) revert InsufficientBalance(account, amount, frozenUnits);
        if (amount != 0) _add(account, amount);
        if (frozenUnits != 0) _freezeUnits(account, frozenUnits);
        if (frozen && !holders[account].frozen) _setFrozen(account, true);
    }

    // ---- freezes

    function setAddressFrozen(address account, bool frozen) external onlyRole(FREEZE) {
        _setFrozen(account, frozen);
    }

    function freezePartialTokens(address account, uint256 amount) external onlyRole(FREEZE) {
        _freezeUnits(account, amount);
    }

    function unfreezePartialTokens(address account, uint256 amount) external onlyRole(FREEZE) {
        Holder storage holder = holders[account];
        if (holder.frozenUnits < amount) revert InsufficientBalance(account, holder.frozenUnits, amount);
        holder.frozenUnits -= uint120(amount);
        emit TokensUnfrozen(account, amount);
    }

    function pause() external onlyRole(PAUSE) {
        paused = true;
        emit Paused(msg.sender);
    }

    function unpause() external onlyRole(PAUSE) {
        paused = false;
        emit Unpaused(msg.sender);
    }

    // ---- settings

    function setIdentityRegistry(IdentityRegistry registry) external onlyOwner {
        identityRegistry = registry;
        emit IdentityRegistryAdded(address(registry));
    }

    /// Document and terms of the issue. Set once: by this call or at deployment.
    function setTerms(bytes32 documentHash_, bytes32 termsHash_, string calldata documentUri_)
        external
        onlyRole(TERMS)
    {
        if (documentHash_ == 0) revert NoDocument();
        if (documentHash != 0) revert TermsAlreadySet();
        _setTerms(documentHash_, termsHash_, documentUri_);
    }

    // ---- internal

    function _setTerms(bytes32 documentHash_, bytes32 termsHash_, string memory documentUri_) private {
        documentHash = documentHash_;
        termsHash = termsHash_;
        documentUri = documentUri_;
        emit TermsSet(documentHash_, termsHash_, documentUri_);
    }

    function _accept(bytes32 operationId) private {
        if (operationAccepted[operationId]) revert OperationAlreadyAccepted(operationId);
        operationAccepted[operationId] = true;
    }

    function _checkMove(address to) private view {
        if (paused) revert TokenPaused();
        if (!identityRegistry.isVerified(to)) revert NotVerified(to);
    }

    function _checkFree(address account, uint256 amount) private view {
        Holder storage holder = holders[account];
        if (holder.frozen) revert Frozen(account);
        uint256 free = uint256(holder.balance) - holder.frozenUnits;
        if (free < amount) revert InsufficientBalance(account, free, amount);
    }

    function _move(address from, address to, uint256 amount) private {
        Holder memory source = holders[from];
        if (source.frozen) revert Frozen(from);
        unchecked {
            uint256 free = uint256(source.balance) - source.frozenUnits;
            if (free < amount) revert InsufficientBalance(from, free, amount);
            source.balance -= uint128(amount);
            holders[from] = source;
            // read after the write, so that a transfer to oneself is correct
            Holder memory target = holders[to];
            if (target.frozen) revert Frozen(to);
            target.balance += uint128(amount);
            holders[to] = target;
        }
        emit Transfer(from, to, amount);
    }

    function _mint(address to, uint256 amount) private {
        if (paused) revert TokenPaused();
        if (!identityRegistry.isVerified(to)) revert NotVerified(to);
        _add(to, amount);
    }

    function _add(address to, uint256 amount) private {
        // every balance is at most the supply, so this check keeps all uint128 sums safe
        uint256 supply = totalSupply + amount;
        if (supply > type(uint128).max) revert AmountTooLarge(amount);
        totalSupply = supply;
        unchecked {
            holders[to].balance += uint128(amount);
        }
        emit Transfer(address(0), to, amount);
    }

    function _burn(address from, uint256 amount) private {
        _take(from, amount);
        unchecked {
            totalSupply -= amount;
        }
        emit Transfer(from, address(0), amount);
    }

    function _take(address from, uint256 amount) private {
        Holder memory source = holders[from];
        if (source.balance < amount) revert InsufficientBalance(from, source.balance, amount);
        unchecked {
            source.balance -= uint128(amount);
            if (source.frozenUnits > source.balance) {
                emit TokensUnfrozen(from, source.frozenUnits - source.balance);
                source.frozenUnits = uint120(source.balance);
            }
        }
        holders[from] = source;
    }

    function _freezeUnits(address account, uint256 amount) private {
        Holder storage holder = holders[account];
        uint256 free = uint256(holder.balance) - holder.frozenUnits;
        if (free < amount) revert InsufficientBalance(account, free, amount);
        uint256 frozenUnits = holder.frozenUnits + amount;
        if (frozenUnits > type(uint120).max) revert AmountTooLarge(amount);
        holder.frozenUnits = uint120(frozenUnits);
        emit TokensFrozen(account, amount);
    }

    function _setFrozen(address account, bool frozen) private {
        holders[account].frozen = frozen;
        emit AddressFrozen(account, frozen, msg.sender);
    }
}
